"""Kept sets against sorting, over logits chosen to be nasty."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from src.engine.sampling import truncation
from src.engine.sampling.truncation import (
    MAX_SHORT_K,
    Truncation,
    farthest_by_mass,
    farthest_by_sorting,
    is_short,
    kth_by_mass,
    kth_by_selection,
    lowest_by_mass,
    lowest_by_pruning,
    truncate_by_floor,
    truncate_long,
    truncate_short,
)

# Few values, so that ties are the rule.
NASTY = [
    -math.inf,
    -1e30,
    -1e4,
    -3.0,
    -1.0,
    -1e-30,
    -0.0,
    0.0,
    1e-30,
    1.0,
    1.0000001,
    2.5,
    88.0,
    1e4,
]

BY_MASS = (kth_by_mass, lowest_by_mass, farthest_by_mass)

Truncate = Callable[[Tensor, Truncation], None]

nasty_logits = st.lists(st.sampled_from(NASTY), min_size=1, max_size=40).filter(
    lambda values: max(values) > -math.inf
)
smooth_logits = st.builds(
    lambda seed, size, spread: (
        np.random.default_rng(seed).standard_normal(size).astype(np.float32) * np.float32(spread)
    ).tolist(),
    st.integers(0, 2**32),
    st.integers(1, 2000),
    st.sampled_from([1e-3, 1.0, 4.0, 50.0]),
)
logits_strategy = nasty_logits | smooth_logits
temperatures = st.sampled_from([1e-5, 0.1, 0.7, 1.0, 2.0])
top_ps = st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 0.9999999, 1.0]) | st.floats(0.001, 1.0)
min_ps = st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0])


def rows_of(temperature: float, top_k: int, top_p: float, min_p: float) -> Truncation:
    return Truncation(
        temperatures=torch.tensor([[temperature]]),
        min_p_offsets=torch.tensor([[temperature * math.log(min_p)]]) if min_p else None,
        top_k=torch.tensor([[top_k]]) if top_k else None,
        max_top_k=top_k,
        top_p=torch.tensor([[top_p]], dtype=torch.float64) if top_p < 1.0 else None,
    )


def kept_by(truncate: Truncate, values: list[float], rows: Truncation) -> np.ndarray:
    logits = torch.tensor([values])
    before = logits.clone()
    truncate(logits, rows)
    dropped = logits != before
    assert bool((logits[dropped] == -math.inf).all())
    # -inf stays what it is, kept or not: it cannot win.
    return (logits[0] > -math.inf).numpy()


def check(
    values: list[float], kept: np.ndarray, temperature: float, k: int, p: float, min_p: float
) -> None:
    """Sort, float64, one parameter after the other, with room for rounding at the thresholds."""
    x = np.array(values, dtype=np.float32).astype(np.float64)
    finite = x > -math.inf
    assert kept.any()
    assert not (kept & ~finite).any()
    assert kept[np.argmax(x)]
    # Whatever is at least as likely as a kept token is kept: ties stand and fall together.
    lowest = x[kept].min()
    assert kept[x >= lowest].all()

    scaled = (x - x.max()) / temperature
    surely, maybe = finite.copy(), finite.copy()
    if min_p:
        room = 1e-4 * max(1.0, np.abs(scaled[np.isfinite(scaled)]).max() * 1e-3)
        surely &= scaled > math.log(min_p) + room
        maybe &= scaled >= math.log(min_p) - room
        surely[np.argmax(x)] = True
    if k:
        at_least = x >= np.sort(x)[::-1][min(k, len(x)) - 1]
        surely &= at_least
        maybe &= at_least
    if p < 1.0:
        weights = np.exp(scaled)
        room = 5e-5
        for base, keep in ((surely, surely), (maybe, maybe)):
            mass = np.where(base, weights, 0.0)
            sorted_x = np.sort(x[base])[::-1]
            sorted_mass = np.exp((sorted_x - x.max()) / temperature)
            # Mass strictly above each token, from the sorted list. Tokens whose weights float32
            # cannot tell apart are tied.
            cumulative = np.concatenate(([0.0], np.cumsum(sorted_mass)))
            ranked, own = -sorted_mass.astype(np.float32), -weights.astype(np.float32)
            above = cumulative[np.searchsorted(ranked, own, side="left")]
            bound = p * mass.sum()
            slack = room * mass.sum()
            keep &= above < (bound - slack if keep is surely else bound + slack)
        surely[np.argmax(x)] = True
    assert not (surely & ~kept).any()
    assert not (kept & ~maybe).any()


@settings(max_examples=100, deadline=None)
@given(logits_strategy, temperatures, st.integers(1, MAX_SHORT_K), top_ps, min_ps)
def test_short(values: list[float], temperature: float, k: int, p: float, min_p: float) -> None:
    k = min(k, len(values))
    kept = kept_by(truncate_short, values, rows_of(temperature, k, p, min_p))
    check(values, kept, temperature, k, p, min_p)


@settings(max_examples=100, deadline=None)
@given(logits_strategy, temperatures, st.integers(0, 3000), top_ps, min_ps)
def test_long(values: list[float], temperature: float, k: int, p: float, min_p: float) -> None:
    k = min(k, len(values))
    kept = kept_by(truncate_long, values, rows_of(temperature, k, p, min_p))
    check(values, kept, temperature, k, p, min_p)


@settings(max_examples=100, deadline=None)
@given(nasty_logits, temperatures, st.integers(1, 40), min_ps)
def test_short_and_long_paths_agree(
    values: list[float], temperature: float, k: int, min_p: float
) -> None:
    rows = rows_of(temperature, min(k, len(values)), 1.0, min_p)
    short = kept_by(truncate_short, values, rows)
    assert np.array_equal(short, kept_by(truncate_long, values, rows))


@settings(max_examples=100, deadline=None)
@given(logits_strategy, st.integers(1, 3000))
def test_mass_finds_the_kth_logit(values: list[float], k: int) -> None:
    logits = torch.tensor([values])
    top_k = torch.tensor([[min(k, len(values))]])
    expected = logits.sort(descending=True).values[0, top_k.item() - 1]
    assert kth_by_mass(logits, top_k).item() == expected
    assert kth_by_selection(logits, top_k).item() == expected


@settings(max_examples=100, deadline=None)
@given(logits_strategy, top_ps.filter(lambda p: p < 1.0))
def test_mass_and_pruning_find_the_same_weight(values: list[float], p: float) -> None:
    logits = torch.tensor([values])
    weights = (logits - logits.amax()).exp()
    top_p = torch.tensor([[p]], dtype=torch.float64)
    assert lowest_by_mass(weights, top_p).item() == lowest_by_pruning(weights, top_p).item()


@pytest.mark.parametrize("k", [1, 7, 40])
def test_top_p_of_one_keeps_all(k: int) -> None:
    values = np.linspace(-60.0, 60.0, 40).tolist()
    kept = kept_by(truncate_short, values, rows_of(1.0, k, 1.0, 0.0))
    assert kept.sum() == k
    both = Truncation(
        torch.ones(2, 1),
        None,
        None,
        0,
        torch.tensor([[1.0], [0.5]], dtype=torch.float64),
    )
    logits = torch.tensor([values, values])
    truncate_long(logits, both)
    assert (logits > -math.inf).sum(1).tolist() == [40, 1]


def test_ties_at_the_threshold_are_kept() -> None:
    values = [0.0, 1.0, 1.0, 1.0, -1.0]
    for truncate in (truncate_short, truncate_long):
        assert kept_by(truncate, values, rows_of(1.0, 2, 1.0, 0.0)).tolist() == [
            False,
            True,
            True,
            True,
            False,
        ]
        # The three ties are 0.86 of the mass that top-k left, each alone far under top_p.
        assert kept_by(truncate, values, rows_of(1.0, 5, 0.01, 0.0)).sum() == 3


def test_top_p_counts_ties_that_top_k_kept() -> None:
    """Five ties for one place make up the mass: four of five reach 0.7, so all five are kept."""
    values = [1.0] * 5 + [0.0] * 5
    for truncate in (truncate_short, truncate_long):
        assert (
            kept_by(truncate, values, rows_of(1.0, 1, 0.7, 0.0)).tolist()
            == [True] * 5 + [False] * 5
        )


def test_ties_that_top_k_kept_are_part_of_all_the_mass() -> None:
    """Of 2.1 with all three ties six tenths are more than the first token has; of 1.37 not."""
    values = [1.0, 0.0, 0.0, 0.0, -1.0]
    for truncate in (truncate_short, truncate_long):
        kept = kept_by(truncate, values, rows_of(1.0, 2, 0.6, 0.0))
        assert kept.tolist() == [True, True, True, True, False]


def test_top_p_is_of_the_mass_that_those_before_it_left() -> None:
    """Half of 1.5 is less than the first token has; half of the 5.5 that all have is more."""
    values = [0.0, math.log(0.5), *[math.log(0.04)] * 100]

    def by_mass(logits: Tensor, rows: Truncation) -> None:
        truncation._truncate_long(logits, rows, *BY_MASS)

    for truncate in (truncate_short, truncate_long, by_mass):
        for top_k, min_p in ((2, 0.0), (102, 0.1)):
            kept = kept_by(truncate, values, rows_of(1.0, top_k, 0.5, min_p))
            assert kept.tolist() == [True] + [False] * 101
    # Without top_k, which a short row has.
    for truncate in (truncate_long, by_mass):
        kept = kept_by(truncate, values, rows_of(1.0, 0, 0.5, 0.1))
        assert kept.tolist() == [True] + [False] * 101


def test_beside_a_row_with_top_p_a_row_without_keeps_what_has_no_mass() -> None:
    # Less than a unit of mass.
    values = [0.0, -60.0, -61.0, -200.0]
    both = Truncation(
        torch.ones(2, 1),
        None,
        torch.tensor([[3], [3]]),
        3,
        torch.tensor([[1.0], [0.5]], dtype=torch.float64),
    )
    for truncate in (truncate_short, truncate_long):
        logits = torch.tensor([values, values])
        truncate(logits, both)
        assert (logits > -math.inf).sum(1).tolist() == [3, 1]


# Probabilities of a half, a quarter, an eighth and twice a sixteenth, and how many of these tokens
# a top_p keeps; a sum that is exactly top_p is enough.
HALVES = [1.0, 0.5, 0.25, 0.125, 0.125]
ENOUGH = [(0.25, 1), (0.5, 1), (0.5 + 1e-9, 2), (0.75, 2), (0.75 + 1e-9, 3), (0.875, 3),
          (0.875 + 1e-9, 5), (0.9375, 5), (0.9375 + 1e-9, 5)]  # fmt: skip


@pytest.mark.parametrize(("p", "count"), ENOUGH)
def test_a_mass_that_is_exactly_top_p_is_enough(p: float, count: int) -> None:
    weights = torch.tensor([HALVES])
    top_p = torch.tensor([[p]], dtype=torch.float64)
    for lowest in (lowest_by_mass, lowest_by_pruning):
        assert lowest(weights, top_p).item() == HALVES[count - 1]
    # Of doubles the exponentials are these to less than a unit of mass, where the quotient is a
    # convergent of the logarithm of 2: what is cut off makes them exact.
    step, temperature = 287209.0, 414355.0
    assert 0 < math.log(2) - step / temperature < 1e-11
    values = [0.0, -step, -2 * step, -3 * step, -3 * step]
    kept = kept_by(truncate_short, values, rows_of(temperature, 5, p, 0.0))
    assert kept.tolist() == [index < count for index in range(5)]


def test_a_mass_that_is_exactly_top_p_is_enough_in_the_whole_row() -> None:
    # Of float32 they are these by rounding.
    values = [-index * math.log(2) for index in (0, 1, 2, 3, 3)]
    assert torch.tensor(values).exp().tolist() == HALVES
    for p, count in ENOUGH:
        for ways in (
            (kth_by_selection, lowest_by_pruning, farthest_by_sorting),
            BY_MASS,
        ):
            logits = torch.tensor([values])
            truncation._truncate_long(logits, rows_of(1.0, 0, p, 0.0), *ways)
            assert (logits[0] > -math.inf).tolist() == [index < count for index in range(5)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fraction", [0.1, 1.0])
def test_unusable_logits_neither_fail_nor_hang(bad: float, fraction: float) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    logits[:, : int(50 * fraction)] = bad
    for k, p, min_p in [(3, 0.9, 0.0), (0, 0.9, 0.1), (3, 1.0, 0.0), (0, 1.0, 0.5)]:
        rows = rows_of(0.7, k, p, min_p)
        for truncate in (
            (truncate_long, truncate_short) if k else (truncate_long, truncate_by_floor)
        ):
            result = logits.clone()
            truncate(result, rows)
            assert result.shape == logits.shape


def test_paths_by_k() -> None:
    assert [is_short(k) for k in (0, 1, MAX_SHORT_K, MAX_SHORT_K + 1)] == [False, True, True, False]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_rows_do_not_disturb_each_other(seed: int, n: int) -> None:
    """Also the device path, by mass: all rows at once equals each row alone."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 777, generator=random) * 3
    rows = Truncation(
        torch.rand(n, 1, generator=random) + 0.1,
        (torch.rand(n, 1, generator=random) * 0.1).log(),
        torch.randint(0, 700, (n, 1), generator=random),
        700,
        torch.rand(n, 1, generator=random).double(),
        # Some rows do not ask for it.
        (torch.rand(n, 1, generator=random) * 6 - 2).clamp(min=0).double(),
        (torch.rand(n, 1, generator=random) * 1.5).clamp(max=1).double(),
    )

    def run(logits: Tensor, rows: Truncation) -> Tensor:
        logits = logits.clone()
        truncation._truncate_long(logits, rows, *BY_MASS)
        return logits

    together = run(logits, rows)
    alone = [run(logits[i : i + 1], rows.part(slice(i, i + 1))) for i in range(n)]
    assert torch.equal(together, torch.cat(alone))
    on_cpu = logits.clone()
    truncate_long(on_cpu, rows)
    assert torch.equal(together, on_cpu)
