"""Each parameter against transformers' processors and against a slow oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from src.engine.sampling.logits import BANNED
from tests.engine.sampling import oracle
from tests.engine.sampling.harness import Bench, Owner, process, sequence

V = 50


def random_logits(seed: int = 0, rows: int | None = None) -> torch.Tensor:
    shape = (V,) if rows is None else (rows, V)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def by_transformers(processor: Any, owner: Owner, logits: torch.Tensor) -> torch.Tensor:
    return processor(torch.tensor([owner.token_ids]), logits[None].clone())[0]


@pytest.mark.parametrize(
    ("params", "processor"),
    [
        ({"repetition_penalty": 1.3}, RepetitionPenaltyLogitsProcessor(1.3)),
        ({"repetition_penalty": 0.8}, RepetitionPenaltyLogitsProcessor(0.8)),
        ({"top_k": 7}, TopKLogitsWarper(7)),
        ({"top_k": 1}, TopKLogitsWarper(1)),
        ({"top_p": 0.6}, TopPLogitsWarper(0.6)),
        ({"top_p": 0.01}, TopPLogitsWarper(0.01)),
        ({"top_p": 0.0}, TopPLogitsWarper(0.0)),
        ({"top_p": 0.0, "top_k": 50}, TopPLogitsWarper(0.0)),
        ({"min_p": 0.1}, MinPLogitsWarper(0.1)),
        (
            {"logit_bias": {3: 5.0, 40: -100.0}},
            SequenceBiasLogitsProcessor([[[3], 5.0], [[40], -100.0]]),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else type(value).__name__,
)
@pytest.mark.parametrize("seed", range(5))
def test_as_transformers_does(params: dict[str, Any], processor: Any, seed: int) -> None:
    owner = sequence([1, 2, 3, 2], [5, 6, 5], **params)
    logits = random_logits(seed)
    expected = by_transformers(processor, owner, logits)
    torch.testing.assert_close(process(owner, logits), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_warpers_in_a_row_as_transformers_does(seed: int) -> None:
    """At temperature 1 and with top-k before top-p, as there."""
    owner = sequence(top_k=20, top_p=0.8)
    logits = random_logits(seed)
    expected = by_transformers(TopKLogitsWarper(20), owner, logits)
    expected = by_transformers(TopPLogitsWarper(0.8), owner, expected)
    assert torch.equal(process(owner, logits), expected)


def test_bad_words_as_transformers_does() -> None:
    words = [(7,), (5, 8), (6, 5, 9), (5, 6, 10), (6, 8), (4, 6, 5, 11), (5, 8, 12)]
    owner = sequence([1, 2], [4, 6, 5], bad=words)
    logits = random_logits()
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=[V + 1])
    expected = by_transformers(processor, owner, logits)
    expected[expected == -math.inf] = BANNED
    assert torch.equal(process(owner, logits), expected)
    assert (expected == BANNED).nonzero().flatten().tolist() == [7, 8, 9, 11]


def test_bad_words_look_at_output_only() -> None:
    logits = random_logits()
    bad = [(3, 9), (3, 5, 9)]
    assert torch.equal(process(sequence([1, 2, 3], bad=bad), logits), logits)
    assert torch.equal(process(sequence([1, 2, 3], [5], bad=bad), logits), logits)
    assert process(sequence([1, 2], [3], bad=bad), logits)[9] == BANNED
    assert process(sequence([1, 2], [3, 5], bad=bad), logits)[9] == BANNED


def test_bad_words_with_a_shared_last_token() -> None:
    """One matches, the other does not: the token is banned, in either order."""
    for bad in ([(4, 9), (5, 9)], [(5, 9), (4, 9)]):
        assert process(sequence([1], [4], bad=bad), random_logits())[9] == BANNED


@pytest.mark.parametrize("length", range(4))
def test_min_tokens_as_transformers_does(length: int) -> None:
    owner = sequence([1, 2], range(10, 10 + length), end=[3, 4], min_tokens=2)
    logits = random_logits()
    processor = MinNewTokensLengthLogitsProcessor(2, 2, [3, 4])
    expected = by_transformers(processor, owner, logits)
    expected[expected == -math.inf] = BANNED
    assert torch.equal(process(owner, logits), expected)


def test_min_tokens_ends_while_the_batch_goes_on() -> None:
    """The ban of each row ends at its own position, without a new installation."""
    bench = Bench(V)
    for row, min_tokens in enumerate([1, 3, 0]):
        bench.install(row, sequence([1], min_tokens=min_tokens, end=[3]))
    banned = []
    for _ in range(4):
        logits, output = bench.sample([2, 0, 1], random_logits(0, 3))
        banned.append((logits[:, 3] == BANNED).tolist())
        for row, token_id in zip([2, 0, 1], output.token_ids.tolist(), strict=True):
            bench.append(row, token_id)
    assert banned == [
        [False, True, True],
        [False, False, True],
        [False, False, True],
        [False, False, False],
    ]


def test_presence_and_frequency_by_hand() -> None:
    owner = sequence([1, 1, 2], [2, 5, 5, 5], presence_penalty=0.5, frequency_penalty=0.25)
    expected = torch.zeros(V)
    expected[2], expected[5] = -0.75, -1.25
    torch.testing.assert_close(process(owner, torch.zeros(V)), expected)


def test_allowed_token_ids_hold_against_every_ban() -> None:
    owner = sequence(
        [1], [5], allowed_token_ids=(4, 4, 6), bad=[(4,), (5, 6)], end=[4], min_tokens=9
    )
    bench = Bench(V)
    for row in range(8):
        bench.install(row, Owner(owner.request, [5 + row]))
    for seed in range(20):
        _, output = bench.sample(range(8), random_logits(seed, 8))
        assert set(output.token_ids.tolist()) <= {4, 6}
    assert set(output.token_ids.tolist()[1:]) == {6}  # there only 4 is banned


def test_logit_bias_forces_and_forbids() -> None:
    bench = Bench(V)
    bench.install(0, sequence(logit_bias={7: 100.0}))
    bench.install(1, sequence(logit_bias={0: -100.0}, allowed_token_ids=(0, 1)))
    for seed in range(20):
        _, output = bench.sample([0, 1], random_logits(seed, 2))
        assert output.token_ids.tolist() == [7, 1]


def test_greedy_takes_the_lowest_index_of_the_maximum() -> None:
    bench = Bench(V)
    # Truncation keeps the likeliest token, so it must not matter.
    bench.install(0, sequence(temperature=0.0, top_k=5, top_p=0.1, min_p=0.9, seed=1))
    logits = torch.zeros(1, V)
    logits[0, [9, 20]] = 1.0
    after, output = bench.sample([0], logits)
    assert output.token_ids.tolist() == [9]
    assert torch.equal(after, logits)


def test_end_tokens_outside_of_the_vocabulary_are_ignored() -> None:
    owner = sequence(end=[V + 5, 3], min_tokens=5, bad=[(V + 1,), (1, V + 2)])
    logits = random_logits()
    after = process(owner, logits)
    assert (after != logits).nonzero().flatten().tolist() == [3]


def test_a_row_that_nobody_owns_is_an_error() -> None:
    bench = Bench(V)
    bench.install(0, sequence())
    bench.held[1] = sequence()
    with pytest.raises(LookupError, match="row 1 "):
        bench.sample([0, 1], random_logits(0, 2))


WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_p": 0.5},
    {"top_k": 3, "top_p": 0.5},
    {"min_p": 0.5},
    {"repetition_penalty": 2.0, "presence_penalty": 1.0},
    {"logit_bias": {7: 3.0}},
    {"allowed_token_ids": (30, 31)},
    {"logprobs": 3},
]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "together"])
def test_rows_with_unusable_logits_have_no_token_whatever_they_ask_for(
    bad: float, alone: bool
) -> None:
    """Not even where the bad logit is one that may not be chosen; -inf is bad if all are that."""
    bench = Bench(V)
    for row, params in enumerate(WISHES):
        bench.install(row, sequence([1], [2], **params))
    batches = [[row] for row in range(len(WISHES))] if alone else [list(range(len(WISHES)))]
    for rows in batches:
        for columns in (slice(5, 6), slice(0, 10), slice(0, V)):
            logits = random_logits(0, len(rows))
            logits[:, columns] = bad
            _, output = bench.sample(rows, logits)
            tokens = output.token_ids.tolist()
            if bad == -math.inf and columns.stop < V:
                assert all(0 <= token < V for token in tokens)
            else:
                assert tokens == [-1] * len(rows)
            assert len(output.logprob_lists()) == len(rows)


def test_a_row_whose_parameters_leave_nothing_has_no_token() -> None:
    bench = Bench(V)
    bench.install(0, sequence(allowed_token_ids=(3,)))
    bench.install(1, sequence())
    logits = random_logits(0, 2)
    logits[:, 3] = -math.inf
    _, output = bench.sample([0, 1], logits)
    assert output.token_ids[0] == -1
    assert output.token_ids[1] >= 0


token_ids = st.integers(0, V - 1)
penalties = st.sampled_from([-2.0, -0.5, 0.0, 0.3, 2.0])
owners = st.builds(
    sequence,
    st.lists(token_ids, min_size=1, max_size=10),
    st.lists(token_ids, max_size=10),
    seed=st.integers(-(2**63), 2**63 - 1),
    end=st.frozensets(token_ids, max_size=3),
    bad=st.lists(st.lists(token_ids, min_size=1, max_size=4).map(tuple), max_size=5),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 5, 20, V, 1000]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
    logit_bias=st.none() | st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=5),
    allowed_token_ids=st.none() | st.lists(token_ids, min_size=1, max_size=9).map(tuple),
    min_tokens=st.integers(0, 5),
    logprobs=st.none() | st.integers(0, 20),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(owners, min_size=1, max_size=6), st.integers(0, 1000))
def test_any_mixture_against_the_oracle(batch: list[Owner], seed: int) -> None:
    """Adjusted logits, of all rows at once; the draw is among tokens that the oracle could draw."""
    bench = Bench(V)
    rows = [5, 0, 3, 7, 1, 2][: len(batch)]
    for row, owner in zip(rows, batch, strict=True):
        bench.install(row, owner)
    raw = random_logits(seed, len(batch))
    after, output = bench.sample(rows, raw)
    for owner, before, logits, token_id in zip(
        batch, raw.numpy(), after.numpy(), output.token_ids.tolist(), strict=True
    ):
        expected = oracle.adjusted(owner, before)
        stayed = logits > -math.inf
        np.testing.assert_allclose(logits[stayed], expected[stayed], rtol=1e-4, atol=1e-4)
        if owner.request.params.is_greedy:
            assert expected[token_id] >= expected.max() - 1e-4
        else:
            assert stayed[token_id]


extremes = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-38, -1e-45, 1e29, -1e29, 3e38, -3e38])


@st.composite
def forbidding(draw: st.DrawFn) -> Owner:
    """All that forbids tokens, together with penalties of every size."""
    sizes = st.sampled_from([5e-324, 1e-300, 1e-39, 1e-30, 1.0, 1e9, 1e30, 1e39, 1.7e308])
    return sequence(
        draw(st.lists(token_ids, min_size=1, max_size=30)),
        draw(st.lists(token_ids, max_size=30)),
        seed=draw(st.integers(0, 99)),
        end=draw(st.frozensets(token_ids, max_size=3)),
        bad=draw(st.lists(st.lists(token_ids, min_size=1, max_size=2).map(tuple), max_size=5)),
        temperature=draw(st.sampled_from([0.0, 1e-5, 0.7, 2.0])),
        presence_penalty=draw(penalties),
        frequency_penalty=draw(penalties),
        repetition_penalty=draw(sizes | st.floats(5e-324, 1.7e308)),
        logit_bias=draw(st.none() | st.dictionaries(token_ids, st.sampled_from([-100.0, 100.0]))),
        allowed_token_ids=draw(st.none() | st.lists(token_ids, min_size=1, max_size=9).map(tuple)),
        min_tokens=draw(st.integers(0, 60)),
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(forbidding(), min_size=1, max_size=4),
    st.lists(st.floats(-30, 30, width=32) | extremes, min_size=V, max_size=V),
    st.frozensets(token_ids, max_size=V - 1),
)
def test_no_penalty_breaks_a_promise(
    batch: list[Owner], raw: list[float], outside: frozenset[int]
) -> None:
    """Whatever their size, over any logits: ``outside`` a grammar, or banned, is not chosen."""
    bench, rows = Bench(V), range(len(batch))
    for row, owner in enumerate(batch):
        bench.install(row, owner)
    before = torch.tensor([raw] * len(batch))
    before[:, list(outside)] = -math.inf
    after, output = bench.sample(rows, before)
    assert not after.isnan().any()
    for owner, logits, token_id in zip(batch, after, output.token_ids.tolist(), strict=True):
        allowed = set(owner.request.params.allowed_token_ids or range(V)) - outside
        # What was finite is finite still, and the rest is not.
        assert set(logits.isfinite().nonzero().flatten().tolist()) == allowed
        assert token_id in allowed or not allowed
        # A ban that is no lower than the logits of the model: then the others win.
        free = {v for v in allowed - banned(owner) if raw[v] > BANNED}
        assert token_id in free or not free


def banned(owner: Owner) -> set[int]:
    found = {word[-1] for word in owner.request.bad_words_token_ids if len(word) == 1}
    for word in owner.request.bad_words_token_ids:
        if len(word) > 1 and owner.output[1 - len(word) :] == list(word[:-1]):
            found.add(word[-1])
    if len(owner.output) < owner.request.params.min_tokens:
        found |= owner.request.end_token_ids
    return found


def test_allowed_ids_are_brought_to_the_device_once_for_all_completions() -> None:
    bench = Bench(V, num_rows=3)
    owner = sequence(allowed_token_ids=tuple(range(9)))
    for row in range(3):
        bench.install(row, owner)
    first, *others = (bench.state.params([row])[0].allowed_ids for row in range(3))
    assert first is not None
    assert all(other is first for other in others)
    # All were preempted, and one comes back.
    for row in range(3):
        bench.install(row, sequence())
    bench.install(1, owner)
    assert bench.state.params([1])[0].allowed_ids is first
    # Others with the same have their own, and nobody's is kept.
    bench.install(1, sequence(allowed_token_ids=tuple(range(9))))
    del owner
    bench.held.clear()
    assert len(bench.state._allowed_ids) == 0
