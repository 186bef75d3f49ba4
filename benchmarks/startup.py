"""How long a start takes, in a fresh process: to ready, to the first token, to compiled code.

`python -m benchmarks.startup SECONDS` is the process that is measured: so many seconds after its
first token at the latest it prints one JSON object. The clock is the system's monotonic one, which
the measuring process shares.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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
            start(config, shared)
        for _ in range(repeats):
            if cold:
                with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as fresh:
                    results.append(start(config, fresh))
            else:
                results.append(start(config, shared))
    return results


def measure_both(config: Config, *, warm_repeats: int) -> dict[str, list[dict[str, float]]]:
    """The same for ``"cold"`` once and then ``"warm"``, with what the cold start has left."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as shared:
        cold = start(config, shared)
        return {"cold": [cold], "warm": [start(config, shared) for _ in range(warm_repeats)]}


def start(
    config: Config, cache: str, *, patience: float = _SECONDS, seconds: float = _SECONDS
) -> dict[str, float]:
    """One start with the artifacts in ``cache``: seconds to each of `STARTUP` that was reached.

    Parameters
    ----------
    patience
        Seconds that what comes after the first token is waited for.
    seconds
        For the whole process.

    Raises
    ------
    subprocess.SubprocessError
        It failed, or took longer.
    """
    # Triton keeps its kernels apart from Inductor.
    environment = environment_of(
        config, SLIPSTREAM_CACHE_DIR=cache, TRITON_CACHE_DIR=str(Path(cache) / "triton")
    )
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.startup", f"{patience:g}"],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=seconds,
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    return {name: seen[name] - begun for name in STARTUP if name in seen}


async def _probe(patience: float) -> dict[str, float]:
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while not seen.keys() >= built.keys():
                    for name, is_built in built.items():
                        if name not in seen and is_built():
                            seen[name] = time.monotonic()
                    await asyncio.sleep(0.01)
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_probe(float(sys.argv[1])))))
