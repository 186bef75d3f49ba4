"""Arrival processes: their order, their rate, and their distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from src.bench.arrivals import RampUp, arrival_times
from src.core.errors import ConfigError

RATES = st.floats(0.01, 1000)
COUNTS = st.integers(1, 300)


@given(COUNTS, RATES, st.floats(0.05, 50), st.integers(0, 2**32))
def test_they_come_in_order_and_at_the_rate(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times(count, rate=rate, burstiness=burstiness, seed=seed)
    assert len(times) == count
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] == count / rate
    assert times == arrival_times(count, rate=rate, burstiness=burstiness, seed=seed)


def test_without_a_rate_all_come_at_once() -> None:
    assert arrival_times(5) == [0.0] * 5
    assert arrival_times(0, rate=3.0) == []


@given(st.integers(2, 50), RATES)
def test_infinite_burstiness_is_a_clock(count: int, rate: float) -> None:
    times = arrival_times(count, rate=rate, burstiness=math.inf)
    assert times == pytest.approx([(i + 1) / rate for i in range(count)])


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_intervals_are_gamma_distributed(burstiness: float) -> None:
    rate, count = 20.0, 20_000
    intervals = np.diff(arrival_times(count, rate=rate, burstiness=burstiness, seed=1), prepend=0)
    # Fixed by the seed: this fails when the process changes, not by chance.
    expected = stats.gamma(burstiness, scale=1 / (rate * burstiness))
    assert stats.kstest(intervals, expected.cdf).pvalue > 0.01
    other = stats.gamma(2 * burstiness, scale=1 / (rate * 2 * burstiness))
    assert stats.kstest(intervals, other.cdf).pvalue < 1e-6


def test_a_poisson_process_counts_like_one() -> None:
    rate, count = 50.0, 50_000
    times = arrival_times(count, rate=rate, seed=3)
    counts = np.histogram(times, bins=int(count / rate))[0]
    # Mean and variance of a Poisson distribution are the same.
    assert counts.mean() == pytest.approx(rate)
    assert counts.var() == pytest.approx(rate, rel=0.15)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_up_grows_from_its_start_to_its_end(strategy: str) -> None:
    ramp = RampUp(strategy, 2.0, 32.0)  # type: ignore[arg-type]
    count = 41
    times = arrival_times(count, ramp_up=ramp, burstiness=math.inf)
    rates = 1 / np.diff(times, prepend=0)
    steps = np.diff(rates) if strategy == "linear" else np.diff(np.log(rates))
    assert rates[[0, -1]] == pytest.approx([2.0, 32.0])
    assert steps == pytest.approx(np.full(count - 1, steps[0]))


@settings(max_examples=50)
@given(COUNTS, st.integers(0, 1000))
def test_a_ramp_up_comes_in_order(count: int, seed: int) -> None:
    times = arrival_times(count, ramp_up=RampUp("linear", 1, 9), seed=seed)
    assert len(times) == count
    assert times == sorted(times)


@pytest.mark.parametrize("values", [{"rate": 0}, {"rate": math.nan}, {"burstiness": 0.0}])
def test_what_is_no_process_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be over 0"):
        arrival_times(3, **({"rate": 1.0} | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "end"), [(0, 5), (5, 4), (1, math.inf)])
def test_what_is_no_ramp_up_is_refused(start: float, end: float) -> None:
    with pytest.raises(ConfigError, match="ramp-up"):
        RampUp("linear", start, end)
