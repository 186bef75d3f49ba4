"""Readings of an idle server, and which of them must not grow."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

MIB: Final = 2**20
# Minimal number of readings to judge memory growth.
_MIN_READINGS: Final = 4
# Allowed growth from the first to the last reading, for objects that are created lazily.
_SLACK: Final = {"tasks": 2, "threads": 16, "descriptors": 8}
# Allowed growth of memory in bytes: allocators take time to settle, and caches have limits.
_GROWTH: Final = 32 * MIB
_GROWTH_SHARE: Final = 0.1
# Allowed additional lines in /metrics, for label values that first occur later.
_MORE_SERIES: Final = 500


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of an idle server.

    Attributes
    ----------
    at, requests
        Seconds since the load began, and the number of requests until then.
    blocks, held, free
        KV cache blocks: all, in use, free or cached.
    alive, gauges
        Completions that the engine knows of, and the sum of the gauges of running and waiting ones.
    tasks, threads, descriptors, memory
        Of the process: asyncio tasks, threads, open files, and resident bytes including children.
    series
        Lines in ``/metrics``.
    """

    at: float
    requests: int
    blocks: int
    held: int
    free: int
    alive: int
    gauges: float
    tasks: int
    threads: int
    descriptors: int
    memory: int
    series: int


def leaks(readings: Sequence[Vitals]) -> list[str]:
    """Descriptions of resources that were not released; empty for a sound server."""
    found = [problem for reading in readings for problem in _not_idle(reading)]
    if len(readings) < 2:
        return found
    first, last = readings[0], readings[-1]
    for name, slack in _SLACK.items():
        before, after = getattr(first, name), getattr(last, name)
        if after > before + slack:
            found.append(f"{name} went from {before} to {after} over {_span(first, last)}")
    if last.series > first.series + _MORE_SERIES:
        found.append(f"/metrics grew from {first.series} to {last.series} lines")
    growth = memory_growth(readings)
    most = max(_GROWTH, _GROWTH_SHARE * first.memory)
    if growth is not None and growth > most:
        found.append(
            f"memory grows: {growth / MIB:.1f} MiB over {_span(first, last)}, "
            f"at most {most / MIB:.1f} are no leak"
        )
    return found


def memory_growth(readings: Sequence[Vitals]) -> float | None:
    """Growth of memory in bytes from the first reading to the last, along its slope.

    The slope is the median of the slopes of all pairs, which a single jump does not move (P. Sen,
    "Estimates of the Regression Coefficient Based on Kendall's Tau", 1968). ``None`` if there are
    too few readings.
    """
    if len(readings) < _MIN_READINGS:
        return None
    slopes = [(b.memory - a.memory) / (b.at - a.at) for a, b in itertools.combinations(readings, 2)]
    return statistics.median(slopes) * (readings[-1].at - readings[0].at)


def _not_idle(reading: Vitals) -> list[str]:
    when = f"{reading.at:.1f} s after the begin, idle"
    found = []
    if reading.held or reading.free != reading.blocks:
        found.append(
            f"{when}: of {reading.blocks} blocks {reading.held} are held and {reading.free} free"
        )
    if reading.alive or reading.gauges:
        found.append(f"{when}: {reading.alive} completions are alive, gauges say {reading.gauges}")
    return found


def _span(first: Vitals, last: Vitals) -> str:
    return f"{last.at - first.at:.0f} s and {last.requests - first.requests} requests"
