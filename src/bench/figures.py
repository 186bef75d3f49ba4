"""Statistics of a list of measured values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """Mean, median, population standard deviation and percentiles; all 0 without values.

    ``percentiles`` maps a percentage (0 to 100) to its value.
    """

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]

    def scaled(self, factor: float) -> Summary:
        """The summary in another unit."""
        return Summary(
            factor * self.mean,
            factor * self.median,
            factor * self.std,
            {percent: factor * value for percent, value in self.percentiles.items()},
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent`` percentile (0 to 100), interpolated linearly between two values.

    Definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), like NumPy
    and vLLM.

    Raises
    ------
    ValueError
        There are no values, or ``percent`` is out of range.
    """
    if not values:
        raise ValueError("a percentile of no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile must be from 0 to 100, got {percent}")
    return _percentile(sorted(values), percent)


def _percentile(ordered: Sequence[float], percent: float) -> float:
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return low + (high - low) * (place - below)


def summarize(values: Sequence[float], percents: Sequence[float]) -> Summary:
    """Summarize ``values``, with one percentile per entry of ``percents`` (0 to 100)."""
    ordered = sorted(values) or [0.0]
    return Summary(
        statistics.fmean(ordered),
        _percentile(ordered, 50),
        statistics.pstdev(ordered),
        {percent: _percentile(ordered, percent) for percent in percents},
    )
