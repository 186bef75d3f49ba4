"""Counts kernels with torch's profiler, and measures how long they and gaps between them take."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from benchmarks.load import MS
from benchmarks.record import Figure
from src import AsyncEngine

# Trace categories of work on a device; only kernels, the first, are counted.
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cpu_op",)


@dataclass(frozen=True)
class Kernels:
    """Kernels on the device (on the CPU: torch's operations), and their total seconds."""

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
    """The kernels of all steps of ``work``; the engine must be idle before and after.

    Raises
    ------
    RuntimeError
        The profiler recorded nothing.
    """
    trace, (category, *_) = await _traced(engine, work)
    found = await asyncio.to_thread(kernels_in, trace, category)
    if not found.count:
        raise RuntimeError(f"the profiler saw no {category} in {len(trace)} bytes of trace")
    return found


async def idle_share(engine: AsyncEngine, work: Callable[[], Awaitable[object]]) -> float:
    """The share of time in which nothing ran on the device, in the second half of ``work``.

    Raises
    ------
    RuntimeError
        The profiler recorded too little.
    """
    trace, categories = await _traced(engine, work)
    return await asyncio.to_thread(idle_share_in, trace, categories)


async def _traced(
    engine: AsyncEngine, work: Callable[[], Awaitable[object]]
) -> tuple[bytes, tuple[str, ...]]:
    """A gzipped Chrome trace of ``work``, and the categories of computations on this device."""
    parts = engine._parts
    assert parts is not None
    await asyncio.wrap_future(parts.profiler.start())
    try:
        await work()
    finally:
        await asyncio.wrap_future(parts.profiler.stop())
    trace = await asyncio.to_thread(parts.profiler.export)
    return trace, _ON_HOST if parts.worker.is_on_cpu else _ON_DEVICE


def kernels_in(trace: bytes, category: str) -> Kernels:
    """Count the events of one category in a gzipped Chrome trace."""
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    times = [event["dur"] for event in events if event.get("cat") == category]
    return Kernels(len(times), sum(times) / 1e6)


def idle_share_in(trace: bytes, categories: Iterable[str]) -> float:
    """The share of time in a gzipped Chrome trace in which no event of these categories runs.

    The first half of the events is left out, because it contains the preparation of the measured
    steps. Overlapping events count once.

    Raises
    ------
    RuntimeError
        There are fewer than two events.
    """
    wanted = frozenset(categories)
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in wanted
    )
    later = spans[len(spans) // 2 :]
    if len(later) < 2:
        raise RuntimeError(f"the profiler saw {len(spans)} of {', '.join(sorted(wanted))}")
    begin = reached = later[0][0]
    busy = 0.0
    for start, end in later:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - begin)
