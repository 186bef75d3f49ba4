"""The process whose start `benchmarks.startup` measures; it prints one JSON object.

Times are on the system's monotonic clock, which the measuring process shares. Only what an engine
needs is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable


async def probe(patience: float) -> dict[str, float]:
    """Times when an engine with the environment's configuration was ready, etc.; its compilation.

    Events after the first token are awaited for ``patience`` seconds.
    """
    from src import AsyncEngine, SamplingParams
    from src.core.settings import load_config

    seen: dict[str, float] = {}
    async with AsyncEngine.open(load_config()) as engine:
        seen["ready"] = time.monotonic()
        async for _ in engine.stream("Once upon a time", SamplingParams(max_tokens=8)):
            seen.setdefault("first_token", time.monotonic())
        # After the start, which imports torch anyway.
        import torch

        from src.ops.build.kernels import is_building, kernel_status

        config = engine.config
        on_cuda = config.device.type != "cpu" and torch.cuda.is_available()
        # What this configuration does not build counts as built when the engine is ready.
        built: dict[str, Callable[[], bool]] = {
            "kernels": lambda: on_cuda or kernel_status() != "reference" or not is_building(),
            "compiled": lambda: not config.compile.is_on or engine.stats.compiled,
        }
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while not seen.keys() >= built.keys():
                    for name, is_built in built.items():
                        if name not in seen and is_built():
                            seen[name] = time.monotonic()
                    await asyncio.sleep(0.01)
        worker = engine._loaded.worker
        seen["compilation"] = worker.code.compile_seconds
        seen["graphs"] = worker.code.num_graphs
    # The compilers are children of this process, and have ended.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {**seen, "compilers_cpu": used.ru_utime + used.ru_stime}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(probe(float(sys.argv[1])))))
