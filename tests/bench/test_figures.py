"""Percentiles and sums, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.bench.figures import percentile, summarize

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


@given(VALUES, st.floats(0, 100))
def test_a_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


@given(VALUES)
def test_a_summary_is_numpys(values: list[float]) -> None:
    found = summarize(values, [25, 90, 99])
    assert found.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert found.median == pytest.approx(np.median(values), abs=1e-6)
    assert found.std == pytest.approx(np.std(values), abs=1e-3, rel=1e-6)
    assert list(found.percentiles) == [25, 90, 99]
    for percent, value in found.percentiles.items():
        assert value == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_a_summary_of_nothing_is_zero_and_scales() -> None:
    found = summarize([], [99]).scaled(1000)
    assert (found.mean, found.median, found.std, found.percentiles) == (0, 0, 0, {99: 0})
    assert summarize([0.5, 1.5], [50]).scaled(1000).percentiles == {50: 1000}


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_what_has_no_percentile_is_refused(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)
