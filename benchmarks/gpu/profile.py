"""How many kernels torch's profiler sees, and how long they run."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.load import MS
from benchmarks.record import Figure
from src import AsyncEngine


@dataclass(frozen=True)
class Kernels:
    """Launched on the device, with the seconds that they ran for; on the CPU torch's operations."""

    count: float
    seconds: float

    def __sub__(self, other: Kernels) -> Kernels:
        return Kernels(self.count - other.count, self.seconds - other.seconds)

    def per(self, steps: int) -> Kernels:
        return Kernels(self.count / steps, self.seconds / steps)

    def figures(self, layers: int) -> dict[str, Figure]:
        return {
            "per_layer": Figure.of("", [self.count / layers]),
            "per_step": Figure.of("", [self.count]),
            "time_per_step": Figure.of("ms", [MS * self.seconds]),
        }


async def profiled(engine: AsyncEngine, work: Callable[[], Awaitable[object]]) -> Kernels:
    """Of all the steps of ``work``, before and after which the engine has nothing to do.

    Raises
    ------
    RuntimeError
        The profiler saw nothing.
    """
    parts = engine._parts
    assert parts is not None
    await asyncio.wrap_future(parts.profiler.start())
    try:
        await work()
    finally:
        await asyncio.wrap_future(parts.profiler.stop())
    trace = await asyncio.to_thread(parts.profiler.export)
    category = "cpu_op" if parts.runner.is_on_cpu else "kernel"
    found = await asyncio.to_thread(kernels_in, trace, category)
    if not found.count:
        raise RuntimeError(f"the profiler saw no {category} in {len(trace)} bytes of trace")
    return found


def kernels_in(trace: bytes, category: str) -> Kernels:
    """Of a gzipped Chrome trace the events of one category."""
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    times = [event["dur"] for event in events if event.get("cat") == category]
    return Kernels(len(times), sum(times) / 1e6)
