"""Reports durations that were measured elsewhere as benchmarks of pytest-benchmark.

A client measures the time to first token, and a parent process measures a start; neither is the
duration of a call. A fake clock, which only advances by reported durations, passes them to
pytest-benchmark, so that they are saved, grouped and compared like all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ReportedClock:
    """A timer for pytest-benchmark that advances by reported durations."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        self._seconds += seconds


REPORTED = ReportedClock()
"""For `@pytest.mark.benchmark(timer=REPORTED)`."""


def report(benchmark: Any, seconds: Iterable[float]) -> None:
    """Report one round per duration; the test must use this module's clock as its timer."""
    durations = list(seconds)
    left = iter(durations)
    benchmark.pedantic(lambda: REPORTED.advance(next(left)), rounds=len(durations))
