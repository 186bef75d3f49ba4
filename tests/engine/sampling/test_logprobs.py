"""Log-probabilities and ranks against log_softmax of the raw logits."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch

from src.core.outputs import TokenLogprobs
from src.engine.sampling import SampleBatch, gather_logprobs
from tests.engine.sampling.harness import Bench, sequence

V = 30


def check(entry: TokenLogprobs | None, logits: torch.Tensor, token_id: int, count: int) -> None:
    assert entry is not None
    expected = logits.double().log_softmax(0)
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(expected[token_id].item(), abs=1e-5)
    assert entry.rank == 1 + int((logits > logits[token_id]).sum())
    assert len(entry.top) == count
    likeliest = expected.sort(descending=True, stable=True)
    assert [token for token, _ in entry.top] == likeliest.indices[:count].tolist()
    assert [value for _, value in entry.top] == pytest.approx(
        likeliest.values[:count].tolist(), abs=1e-5
    )


@pytest.mark.parametrize("counts", [[5], [0, 3, 20], [None, 2, None, 0], [None, None]])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 3, "repetition_penalty": 2.0, "logit_bias": {2: 50.0}},
        {"min_tokens": 3},
        {"logit_bias": {2: 50.0}},
        {"allowed_token_ids": (3, 5, 7)},
        {"bad": [(6,)]},
        {"bad": [(2, 6)]},
        {"repetition_penalty": 2.0},
        {"top_p": 0.2},
        {"min_p": 0.5},
    ],
    ids=str,
)
def test_sampled_tokens_are_scored_raw(counts: list[int | None], params: dict[str, Any]) -> None:
    bench = Bench(V)
    for row, count in enumerate(counts):
        bench.install(row, sequence([1], [2], seed=row, end=[4], logprobs=count, **params))
    logits = torch.randn(len(counts), V, generator=torch.Generator().manual_seed(3))
    _, output = bench.sample(range(len(counts)), logits)
    entries = output.to_host().logprob_lists()
    assert len(entries) == len(counts)
    tokens = output.token_ids.tolist()
    for entry, count, row, token_id in zip(entries, counts, logits, tokens, strict=True):
        if count is None:
            assert entry is None
        else:
            check(entry, row, token_id, count)


@pytest.mark.parametrize("counts", [[5], [0, 3], [None, 2], [2, None, 0]])
def test_they_are_raw_where_only_a_grammar_changes_the_logits(counts: list[int | None]) -> None:
    bench = Bench(V)
    for row, count in enumerate(counts):
        bench.install(row, sequence([1], [2], seed=row, logprobs=count))
    logits = torch.randn(len(counts), V, generator=torch.Generator().manual_seed(5))
    # All but the three least likely are barred.
    mask = torch.zeros_like(logits).masked_fill_(
        logits > logits.kthvalue(3, 1, True).values, -math.inf
    )
    rows = range(len(counts))
    batch = SampleBatch(rows, [2] * len(counts), mask=mask)
    output = bench.sampler.sample(logits.clone(), batch, bench.tokens)
    entries, tokens = output.to_host().logprob_lists(), output.token_ids.tolist()
    for entry, count, row, token_id in zip(entries, counts, logits, tokens, strict=True):
        assert (row < row[token_id]).sum() < 3
        if count is None:
            assert entry is None
        else:
            check(entry, row, token_id, count)


@pytest.mark.parametrize("k", [0, 1, 20, V, V + 10])
def test_prompt_tokens(k: int) -> None:
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(6, V, generator=random) * 5
    targets = torch.randint(0, V, (6,), generator=random)
    entries = gather_logprobs(logits, targets, k).to_host().to_lists()
    for entry, row, token_id in zip(entries, logits, targets.tolist(), strict=True):
        check(entry, row, token_id, min(k, V))


def test_equal_logits_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    ranks = [gather_logprobs(logits, torch.tensor([i]), 0).ranks.item() for i in range(4)]
    assert ranks == [3, 1, 1, 4]


def test_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, -math.inf]])
    (entry,) = gather_logprobs(logits, torch.tensor([1]), 2).to_lists()
    assert entry == TokenLogprobs(1, -math.inf, 2, ((0, 0.0), (1, -math.inf)))


def test_the_garbage_collector_has_nothing_to_follow() -> None:
    """A long prompt has hundreds of thousands of entries and pairs."""
    entries = gather_logprobs(torch.randn(50, V), torch.arange(50) % V, 5).to_lists()
    for _ in range(2):  # a tuple is let go of after what is in it
        gc.collect()
    followed = [entry for entry in entries if gc.is_tracked(entry) or gc.is_tracked(entry.top)]
    pairs = [pair for entry in entries for pair in entry.top if gc.is_tracked(pair)]
    assert not followed + pairs
