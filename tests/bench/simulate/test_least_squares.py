from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from src.bench.simulate.least_squares import nonnegative, prices

seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.integers(1, 6), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_it_is_the_nonnegative_least_squares(seed: int, features: int, rows: int) -> None:
    source = np.random.default_rng(seed)
    matrix = source.normal(size=(rows, features))
    values = source.normal(size=rows)
    _, best = nnls(matrix, values)
    found = nonnegative(matrix, values)
    assert (found >= 0).all()
    assert np.linalg.norm(matrix @ found - values) == pytest.approx(best, rel=1e-6, abs=1e-9)


@given(seeds, st.lists(st.floats(0, 100), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_prices_without_noise_are_found(seed: int, wanted: list[float]) -> None:
    source = np.random.default_rng(seed)
    features = source.integers(0, 1000, size=(60, len(wanted))).astype(float)
    features[:, 0] = 1.0
    seconds = features @ np.array(wanted)
    assert prices(features, seconds) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_predictions_add_up_to_what_was_measured(seed: int) -> None:
    """Whatever the scatter is: a model of steps that is off on average predicts no throughput."""
    source = np.random.default_rng(seed)
    features = source.integers(0, 100, size=(200, 4)).astype(float)
    features[:, 0] = 1.0
    seconds = (features @ np.array([2.0, 0.1, 0.0, 0.5])) * source.lognormal(sigma=0.5, size=200)
    assert (features @ prices(features, seconds)).sum() == pytest.approx(seconds.sum(), rel=0.02)


def test_a_column_of_nothing_costs_nothing() -> None:
    features = np.array([[1.0, 0.0], [1.0, 0.0]])
    assert prices(features, np.array([3.0, 5.0])).tolist() == pytest.approx([4.0, 0.0])
