"""Arrival times of requests: at once, at a rate with a given burstiness, or at a growing rate.

vLLM's arrival processes: intervals are drawn from a gamma distribution whose shape is the
burstiness, so 1 is a Poisson process, less is more bursty, and infinity sends like a clock.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Literal

import msgspec

from src.core.errors import ConfigError


class RampUp(msgspec.Struct, frozen=True):
    """A rate that grows from ``start`` to ``end`` requests per second over all requests."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def __post_init__(self) -> None:
        if not 0 < self.start <= self.end < math.inf:
            raise ConfigError(
                "a ramp-up begins over 0 requests per second and ends no lower, got "
                f"{self.start:g} to {self.end:g}"
            )

    def rate(self, index: int, count: int) -> float:
        """Requests per second at request ``index`` of ``count``."""
        progress = index / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * math.pow(self.end / self.start, progress)


def arrival_times(
    count: int,
    *,
    rate: float = math.inf,
    burstiness: float = 1.0,
    ramp_up: RampUp | None = None,
    seed: int = 0,
) -> list[float]:
    """Seconds from the start to each of ``count`` requests, in ascending order.

    At a constant rate, times are scaled so that the last request comes after exactly
    ``count / rate`` seconds; otherwise the actual rate would depend on the seed.

    Parameters
    ----------
    rate
        Requests per second; infinity sends all at once. Ignored with ``ramp_up``.
    burstiness
        Shape of the gamma distribution of the intervals, over 0.

    Raises
    ------
    ConfigError
        A parameter is out of range.
    """
    if not rate > 0:
        raise ConfigError(f"--request-rate must be over 0, got {rate:g}")
    if not burstiness > 0:
        raise ConfigError(f"--burstiness must be over 0, got {burstiness:g}")
    if ramp_up is None and math.isinf(rate):
        return [0.0] * count
    source = random.Random(seed)
    rates = [rate if ramp_up is None else ramp_up.rate(i, count) for i in range(count)]
    times = list(itertools.accumulate(_interval(source, each, burstiness) for each in rates))
    if ramp_up is None and times and times[-1] > 0:
        end = count / rate
        stretch = end / times[-1]
        # Rounding must neither miss the end nor exceed it.
        times = [*(min(end, stretch * time) for time in times[:-1]), end]
    return times


def _interval(source: random.Random, rate: float, burstiness: float) -> float:
    if math.isinf(burstiness):
        return 1 / rate
    return source.gammavariate(burstiness, 1 / (rate * burstiness))
