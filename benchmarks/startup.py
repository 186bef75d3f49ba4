"""How long a start takes, in a fresh process: to ready, to the first token, to compiled code.

`python -m benchmarks.startup` is the process that is measured: it prints one JSON object. The clock
is the system's monotonic one, which the measuring process shares.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from src.bench.server_process import environment_of
from src.core.config import Config
from src.core.settings import CHECKOUT, load_config

STARTUP = {
    "ready": "s",
    "first_token": "s",
    "kernels": "s",
    "compiled": "s",
}
_SECONDS = 1200


def measure(config: Config, *, cold: bool, repeats: int) -> list[dict[str, float]]:
    """Seconds from the start of the process, per repeat.

    Cold: an artifact cache of its own, so everything is built. Warm: a cache that one start, which
    is not counted, has filled.
    """
    results = []
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as shared:
        if not cold:
            _start(config, shared)
        for _ in range(repeats):
            if cold:
                with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as fresh:
                    results.append(_start(config, fresh))
            else:
                results.append(_start(config, shared))
    return results


def measure_both(config: Config, *, warm_repeats: int) -> dict[str, list[dict[str, float]]]:
    """The same for ``"cold"`` once and then ``"warm"``, with what the cold start has left."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as shared:
        cold = _start(config, shared)
        return {"cold": [cold], "warm": [_start(config, shared) for _ in range(warm_repeats)]}


def _start(config: Config, cache: str) -> dict[str, float]:
    environment = environment_of(config, SLIPSTREAM_CACHE_DIR=cache)
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.startup"],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_SECONDS,
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    return {name: seen[name] - begun for name in STARTUP}


async def _probe() -> dict[str, float]:
    from src import AsyncEngine, SamplingParams

    seen: dict[str, float] = {}
    async with AsyncEngine.open(load_config()) as engine:
        seen["ready"] = time.monotonic()
        async for _ in engine.stream("Once upon a time", SamplingParams(max_tokens=8)):
            seen.setdefault("first_token", time.monotonic())
        # After the start, which imports torch itself.
        import torch

        from src.ops.cpu.build import kernel_status

        config = engine.config
        on_cuda = config.device.type != "cpu" and torch.cuda.is_available()
        # What is not built in this configuration is there when the engine is ready.
        built: dict[str, Callable[[], bool]] = {
            "kernels": lambda: on_cuda or kernel_status() != "reference",
            "compiled": lambda: not config.compile.is_on or engine.stats.compiled,
        }
        async with asyncio.timeout(_SECONDS):
            while not seen.keys() >= built.keys():
                for name, is_built in built.items():
                    if name not in seen and is_built():
                        seen[name] = time.monotonic()
                await asyncio.sleep(0.01)
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_probe())))
