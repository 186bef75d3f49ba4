import math
from typing import Any

import pytest

from src.core.errors import InvalidRequestError
from src.core.sampling_params import LogitsProcessorCall, SamplingParams

VOCAB = 100


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("n", 0),
        ("n", 129),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_k", -2),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 1.1),
        ("top_n_sigma", -0.1),
        ("top_n_sigma", math.nan),
        ("typical_p", 1.1),
        ("typical_p", -0.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop", ("x" * 1025,)),
        ("bad_words", ("",)),
        ("bad_words", ("x",) * 129),
        ("stop_token_ids", (VOCAB,)),
        ("stop_token_ids", (1,) * 129),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", (1,) * (VOCAB + 1)),
        ("logit_bias", {VOCAB: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("logits_processors", (LogitsProcessorCall("any"),) * 9),
        ("logits_processors", (LogitsProcessorCall("any", {"pad": "x" * 16_384}),)),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(field: str, bad: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: bad}).validate(vocab_size=VOCAB)
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"n": 128, "temperature": 2.0, "top_k": -1, "top_p": 1.0, "min_p": 1.0},
        {"top_p": 0.0},
        {"typical_p": 0.0, "top_n_sigma": 100.0},
        {"typical_p": 1.0, "top_n_sigma": 0.0},
        {"temperature": 0.0, "top_p": 1e-9, "seed": -(2**63), "logprobs": 0},
        {"max_tokens": 5, "min_tokens": 5, "stop": ("x" * 1024,) * 16},
        {"allowed_token_ids": (0, VOCAB - 1), "logit_bias": {0: -100.0, 99: 100.0}},
    ],
)
def test_the_bounds_themselves_are_accepted(good: dict[str, Any]) -> None:
    SamplingParams(**good).validate(vocab_size=VOCAB)


def test_min_tokens_over_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens must be from 0 to 4, got 5"):
        SamplingParams(max_tokens=4, min_tokens=5).validate(vocab_size=VOCAB)


def test_tiny_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy
