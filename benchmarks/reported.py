"""Durations that something else has measured, as benchmarks of pytest-benchmark.

A time to first token is seen by a client, a start by the process that started: neither is how long
a call takes. They are told to a clock that stands still otherwise, so that they are saved, grouped
and compared like all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ReportedClock:
    """A timer of pytest-benchmark's that goes forward by what it is told."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        self._seconds += seconds


REPORTED = ReportedClock()
"""For `@pytest.mark.benchmark(timer=REPORTED)`."""


def report(benchmark: Any, seconds: Iterable[float]) -> None:
    """One round per duration; the test is marked with this module's clock as its timer."""
    durations = list(seconds)
    left = iter(durations)
    benchmark.pedantic(lambda: REPORTED.advance(next(left)), rounds=len(durations))
