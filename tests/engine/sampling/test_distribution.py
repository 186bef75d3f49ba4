"""Sampled frequencies against the exact distribution, by chi-square.

Seeds are fixed, so a run gives the same result every time; the level is such that a right sampler
would have failed it once in ten thousand choices of those seeds.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from scipy import stats

from src.core.step_message import DeviceRequest
from src.engine.sampling import SampleBatch
from tests.engine.sampling import oracle
from tests.engine.sampling.harness import Bench, sequence

V = 40
ROWS = 2048
LEVEL = 1e-4
PROMPT, OUTPUT = [1, 2, 3, 2], [5, 6, 5, 30]


def assert_drawn_from(expected: np.ndarray, drawn: np.ndarray) -> None:
    counts = np.bincount(drawn, minlength=V).astype(float)
    assert counts[expected == 0].sum() == 0
    means = expected * len(drawn)
    # Rare tokens share a bin, as the test's approximation asks for.
    rare = means < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    means = np.append(means[~rare], means[rare].sum())
    observed, means = observed[means > 0], means[means > 0]
    if len(means) == 1:
        assert observed[0] == len(drawn)
        return
    assert stats.chisquare(observed, means, sum_check=False).pvalue > LEVEL


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1, "temperature": 1.5},
        {"top_k": 10, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
        {"typical_p": 0.6, "temperature": 1.4},
        {"top_n_sigma": 1.1, "temperature": 2.0},
        {"top_n_sigma": 2.0, "min_p": 0.02, "top_k": 20, "typical_p": 0.8, "top_p": 0.7},
        {"presence_penalty": 1.0, "frequency_penalty": 0.7},
        {"presence_penalty": -1.5, "temperature": 0.8},
        {"repetition_penalty": 1.5},
        {"logit_bias": {0: 2.0, 7: -1.0}, "top_p": 0.9},
        {"allowed_token_ids": (3, 9, 11), "temperature": 2.0},
        {"min_tokens": 9},
    ],
    ids=str,
)
def test_one_draw_of_many_seeds(params: dict[str, Any]) -> None:
    owner = sequence(PROMPT, OUTPUT, end=[4], bad=[(8,), (5, 30, 9), (30, 10)], **params)
    raw = torch.randn(V, generator=torch.Generator().manual_seed(len(str(params)))) * 2
    bench = Bench(V, ROWS, 16)
    drawn = []
    for start in range(0, 3 * ROWS, ROWS):
        for row in range(ROWS):
            request = msgspec.structs.replace(owner.request, seed=start + row)
            bench.state.install(row, DeviceRequest.of(request), len(PROMPT))
            bench.held[row] = owner
        bench.tokens[:, : len(owner.token_ids)] = torch.tensor(owner.token_ids, dtype=torch.int32)
        _, output = bench.sample(range(ROWS), raw.expand(ROWS, V).contiguous())
        drawn.append(output.token_ids.numpy())
    assert_drawn_from(oracle.probabilities(owner, raw.numpy()), np.concatenate(drawn))


def test_many_draws_of_one_seed() -> None:
    """Along one sequence, position after position, the draws are of the distribution too."""
    raw = torch.randn(V, generator=torch.Generator().manual_seed(5))
    bench = Bench(V, 1, 3)
    owner = sequence([1], seed=1234567)
    bench.install(0, owner)
    drawn = []
    for position in range(1, 2001):
        output = bench.sampler.sample(raw[None].clone(), SampleBatch([0], [position]), bench.tokens)
        drawn.append(output.token_ids.item())
    expected = oracle.probabilities(owner, raw.numpy())
    assert_drawn_from(expected, np.array(drawn))
    # Neighbouring draws are independent: pairs of halves of the vocabulary.
    likely = np.isin(drawn, np.argsort(-expected)[:4]).astype(int)
    table = np.zeros((2, 2))
    np.add.at(table, (likely[:-1], likely[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > LEVEL
