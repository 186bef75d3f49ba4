"""Which batches ask for no more than a draw, so that one captured call serves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from src.engine.sampling import SampleBatch
from tests.engine.sampling.harness import Bench, sequence

V = 20
# Prompts have three tokens.
PLAIN: list[dict[str, Any]] = [
    *({}, {"temperature": 0.0}, {"temperature": 0.3}),
    # The likeliest token is in whatever is left.
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
]
MORE: list[dict[str, Any]] = [
    *({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 0}, {"presence_penalty": 0.1}),
    *({"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}, {"logit_bias": {2: 1.0}}),
    *({"allowed_token_ids": (1, 2)}, {"bad": [(3,)]}, {"bad": [(3, 4)]}),
]


def only_draws(*params: dict[str, Any], position: int = 3, mask: bool = False) -> bool:
    bench = Bench(V)
    for row, given in enumerate(params):
        bench.install(row, sequence(end=[4], **given))
    rows = range(len(params))
    added = torch.zeros(len(params), V) if mask else None
    return bench.sampler.only_draws(SampleBatch(rows, [position] * len(params), mask=added))


def test_a_temperature_is_no_more_than_a_draw() -> None:
    assert only_draws(*PLAIN)


@pytest.mark.parametrize("params", MORE, ids=str)
def test_anything_else_is_more(params: dict[str, Any]) -> None:
    assert not only_draws(*PLAIN, params)
    assert not only_draws(params)


def test_a_grammar_is_more() -> None:
    assert not only_draws(*PLAIN, mask=True)


@pytest.mark.parametrize("min_tokens", [1, 2])
def test_an_end_token_that_waits_is_more_until_it_may_come(min_tokens: int) -> None:
    params = {"min_tokens": min_tokens}
    found = [only_draws({}, params, position=3 + output) for output in range(4)]
    assert found == [output >= min_tokens for output in range(4)]


def test_it_is_asked_anew_when_a_row_changes_hands() -> None:
    bench = Bench(V)
    batch = SampleBatch([0], [3])
    answers = []
    for params in ({}, {"top_k": 3}, {}):
        bench.install(0, sequence(**params))
        answers += [bench.sampler.only_draws(batch), bench.sampler.only_draws(batch)]
    assert answers == [True, True, False, False, True, True]
