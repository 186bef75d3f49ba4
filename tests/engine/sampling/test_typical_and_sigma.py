"""Locally typical sampling and top-n-sigma, against their papers in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from src.core.sampling_params import SamplingParams
from src.engine.sampling import truncation
from src.engine.sampling.logits import BANNED
from src.engine.sampling.truncation import (
    OFF,
    Truncation,
    farthest_by_mass,
    farthest_by_sorting,
    kth_by_mass,
    lowest_by_mass,
    numbers_of,
    path_of,
    truncate_by_floor,
    truncate_long,
    truncate_short,
)
from tests.engine.sampling.oracle import typical

VOCABULARY = 3000
spreads = st.sampled_from([0.1, 1.0, 4.0, 20.0])
seeds = st.integers(0, 2**32)


def rows_of(*asked: SamplingParams) -> Truncation:
    numbers = [numbers_of(params) for params in asked]
    return Truncation.of(
        torch.tensor([params.temperature for params in asked]),
        torch.tensor([params.top_k for params in asked]),
        torch.tensor(numbers, dtype=torch.float64),
        [(params.top_k, given) for params, given in zip(asked, numbers, strict=True)],
    )


def smooth(seed: int, spread: float) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(VOCABULARY) * spread
    return torch.tensor(values, dtype=torch.float32)[None]


def kept(logits: Tensor, params: SamplingParams) -> np.ndarray:
    path = path_of(params.top_k, numbers_of(params))
    assert path is not None
    changed = logits.clone()
    path(changed, rows_of(params))
    left = changed > -math.inf
    assert torch.equal(changed[left], logits[left])
    return left[0].numpy()


@settings(max_examples=60, deadline=None)
@given(seeds, spreads, st.sampled_from([0.3, 0.7, 1.0, 2.0]), st.floats(0.0, 0.999))
def test_what_is_typical_is_what_the_paper_says(
    seed: int, spread: float, temperature: float, mass: float
) -> None:
    logits = smooth(seed, spread)
    found = kept(logits, SamplingParams(temperature=temperature, typical_p=mass))
    scaled = logits[0].double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    probabilities = weights / weights.sum()
    # Rounding may decide about tokens at the very edge, whose mass is next to nothing.
    surely, maybe = typical(probabilities, mass - 1e-4), typical(probabilities, mass + 1e-4)
    heavy = weights > 2.0**-30
    assert found.any()
    # At a mass of nothing the nearest of two that are all but equally near may be either.
    if mass > 1e-3:
        assert not (surely & ~found & heavy).any()
        assert not (found & ~maybe & heavy).any()


def test_typical_p_drops_what_is_too_likely() -> None:
    # The likeliest token is farther from the entropy of 2.05 nats than the ten others.
    logits = torch.tensor([[math.log(0.4)] + [math.log(0.06)] * 10])
    # |0.92 - 2.05| = 1.14, and |2.81 - 2.05| = 0.76
    assert kept(logits, SamplingParams(typical_p=0.5)).tolist() == [False] + [True] * 10
    assert kept(logits, SamplingParams(typical_p=0.61)).tolist() == [True] * 11


def test_equally_typical_tokens_are_kept_together() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, -9.0]])
    for mass in (0.0, 1e-9, 0.3, 0.9):
        assert kept(logits, SamplingParams(typical_p=mass)).tolist() == [True] * 4 + [False]


def test_typical_p_is_of_what_those_before_it_left_and_top_p_of_what_it_left() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0]])
    two = kept(logits, SamplingParams(top_k=2, typical_p=0.5))
    weights = np.exp([3.0, 2.0])
    assert two.tolist() == [*typical(weights / weights.sum(), 0.5), False, False, False, False]
    whole = np.exp(logits[0].double().numpy())
    probabilities = whole / whole.sum()
    for mass in (0.2, 0.5, 0.8):
        left = typical(probabilities, mass)
        largest = int(np.argmax(np.where(left, probabilities, 0.0)))
        one = kept(logits, SamplingParams(typical_p=mass, top_p=0.0))
        assert np.flatnonzero(one).tolist() == [largest]


@settings(max_examples=60, deadline=None)
@given(
    seeds,
    spreads,
    st.sampled_from([0.1, 1.0, 2.0]),
    st.floats(0.01, 5.0),
    st.sampled_from([0, 5, 2000]),
)
def test_n_sigma_is_what_the_paper_says(
    seed: int, spread: float, temperature: float, n: float, top_k: int
) -> None:
    logits = smooth(seed, spread)
    # Neither is a logit of the model's.
    logits[0, 7], logits[0, 9] = BANNED, -math.inf
    params = SamplingParams(temperature=temperature, top_n_sigma=n, top_k=top_k)
    found = kept(logits, params)
    values = logits[0].double().numpy()
    real = values[values > BANNED]
    threshold = real.max() - n * real.std()
    expected = values >= threshold
    if top_k:
        expected &= values >= np.sort(values)[-top_k]
    edge = np.abs(values - threshold) < 1e-5 * spread
    assert np.array_equal(found[~edge], expected[~edge])


@pytest.mark.parametrize("lowest", [-9.9999994e29, -5e29, BANNED])
def test_n_sigma_leaves_out_what_is_pushed_down_next_to_a_ban(lowest: float) -> None:
    """A processor's least number, say, which is clamped."""
    logits = smooth(3, 3.0)
    params = SamplingParams(top_n_sigma=1.0)
    logits[0, :5] = -math.inf
    expected = kept(logits, params)
    logits[0, :5] = lowest
    assert torch.equal(torch.as_tensor(kept(logits, params)), torch.as_tensor(expected))


def test_n_sigma_of_equal_logits_keeps_them_all_and_of_0_is_off() -> None:
    logits = torch.full((1, 10), 2.5)
    assert kept(logits, SamplingParams(top_n_sigma=1e-9)).all()
    assert path_of(0, numbers_of(SamplingParams(top_n_sigma=0.0))) is None
    both = torch.stack([torch.arange(10.0)] * 2)
    truncate_by_floor(both, rows_of(SamplingParams(top_n_sigma=0.5), SamplingParams(min_p=0.0)))
    assert (both > -math.inf).sum(1).tolist() == [2, 10]


def test_paths() -> None:
    def of(**asked: float) -> object:
        params = SamplingParams(**asked)  # type: ignore[arg-type]
        return path_of(params.top_k, numbers_of(params))

    assert of() is None
    assert of(typical_p=1.0, top_n_sigma=0.0) is None
    assert of(top_n_sigma=1.0, min_p=0.1) is truncate_by_floor
    assert of(top_n_sigma=1.0, top_k=5) is truncate_short
    assert of(typical_p=0.5, top_k=5) is truncate_long
    assert of(typical_p=0.5) is truncate_long
    # A greedy row has the likeliest token, whatever is typical.
    assert numbers_of(SamplingParams(temperature=0.0, typical_p=0.1, top_n_sigma=1.0)) == OFF


@settings(max_examples=40, deadline=None)
@given(seeds, spreads, st.floats(1e-6, 0.9999))
def test_sorting_and_mass_agree(seed: int, spread: float, mass: float) -> None:
    logits = smooth(seed, spread)
    maxima = logits.amax(1, keepdim=True)
    weights = (logits - maxima).exp()
    distances = truncation._distances(maxima - logits, weights)
    typical_p = torch.tensor([[mass]], dtype=torch.float64)
    found = farthest_by_mass(distances, weights, typical_p)
    assert torch.equal(found, farthest_by_sorting(distances, weights, typical_p))


@pytest.mark.parametrize(
    ("mass", "count"),
    [(0.5, 1), (0.5 + 1e-9, 2), (0.75, 2), (0.75 + 1e-9, 3), (0.875, 3), (0.875 + 1e-9, 5)],
)
def test_a_mass_that_is_exactly_typical_p_is_enough(mass: float, count: int) -> None:
    # Probabilities of a half, a quarter, an eighth and twice a sixteenth, in an order of their own.
    weights = torch.tensor([[0.25, 0.125, 1.0, 0.125, 0.5]])
    distances = torch.tensor([[0.3, 0.4, 0.1, 0.4, 0.2]])
    typical_p = torch.tensor([[mass]], dtype=torch.float64)
    for farthest in (farthest_by_mass, farthest_by_sorting):
        found = distances <= farthest(distances, weights, typical_p)
        assert int(found.sum()) == count


@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_row_is_the_same_in_any_batch(n: int) -> None:
    logits = torch.cat([smooth(seed, 3.0) for seed in range(n)])
    asked = [
        SamplingParams(
            temperature=0.5 + index / n,
            typical_p=(0.2, 1.0, 0.9)[index % 3],
            top_n_sigma=(0.0, 1.5)[index % 2],
            top_p=(0.9, 1.0)[index % 2],
        )
        for index in range(n)
    ]

    def by_mass(values: Tensor, rows: Truncation) -> Tensor:
        changed = values.clone()
        ways = (kth_by_mass, lowest_by_mass, farthest_by_mass)
        truncation._truncate_long(changed, rows, *ways)
        return changed

    together = by_mass(logits, rows_of(*asked))
    for index, params in enumerate(asked):
        row = logits[index : index + 1]
        assert torch.equal(together[index], by_mass(row, rows_of(params))[0])
        on_cpu = row.clone()
        truncate_long(on_cpu, rows_of(params))
        assert torch.equal(together[index], on_cpu[0])


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 1001])
def test_a_sum_in_order_is_the_sum_in_any_batch(width: int) -> None:
    # Of all bits: sums of what float32 holds are exact in any order.
    random = torch.Generator().manual_seed(width)
    values = torch.randn(5, width, generator=random, dtype=torch.float64)
    before = values.clone()
    sums = truncation._sum_in_order(values)
    assert torch.equal(values, before)
    torch.testing.assert_close(sums, values.sum(1, keepdim=True), rtol=1e-12, atol=1e-12)
    for index in range(5):
        assert torch.equal(sums[index], truncation._sum_in_order(values[index, None])[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, BANNED])
@pytest.mark.parametrize("fraction", [0.1, 1.0])
def test_unusable_logits_neither_fail_nor_hang(bad: float, fraction: float) -> None:
    logits = smooth(1, 1.0)
    logits[:, : int(VOCABULARY * fraction)] = bad
    for params in (
        SamplingParams(typical_p=0.5),
        SamplingParams(top_n_sigma=1.0),
        SamplingParams(top_n_sigma=1.0, top_k=9),
        SamplingParams(typical_p=0.9, top_n_sigma=1.0, top_p=0.5, min_p=0.1),
    ):
        path = path_of(params.top_k, numbers_of(params))
        assert path is not None
        changed = logits.clone()
        path(changed, rows_of(params))
        if bad == BANNED:
            # Whatever is banned, something is left to draw.
            assert bool((changed > -math.inf).any())
