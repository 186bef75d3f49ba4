"""What an operator forbids is refused by name, and what is left goes through."""

from typing import Any

import pytest

from src.core.config import LimitsSection
from src.core.errors import InvalidRequestError
from src.core.limits import check_limits
from src.core.sampling_params import SamplingParams
from src.core.settings import load_config

LIMITS = LimitsSection(
    max_n=2,
    max_logprobs=1,
    max_stop_strings=1,
    max_stop_string_chars=3,
    max_stop_token_ids=1,
    max_bad_words=1,
    max_logit_bias=1,
)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("n", 2, 3),
        ("logprobs", 1, 2),
        ("prompt_logprobs", 1, 2),
        ("stop", ("abc",), ("a", "b")),
        ("stop", ("abc",), ("abcd",)),
        ("stop_token_ids", (1,), (1, 2)),
        ("bad_words", ("a",), ("a", "b")),
        ("logit_bias", {1: 1.0}, {1: 1.0, 2: 1.0}),
    ],
)
def test_a_limit_holds_from_the_next_on(field: str, good: Any, bad: Any) -> None:
    check_limits(SamplingParams(**{field: good}), LIMITS)
    check_limits(SamplingParams(**{field: bad}), LimitsSection())
    with pytest.raises(InvalidRequestError, match=f"^{field} may .* at most") as refused:
        check_limits(SamplingParams(**{field: bad}), LIMITS)
    assert refused.value.param == field


def test_limits_are_settings() -> None:
    config = load_config(environ={"SLIPSTREAM_LIMITS__MAX_N": "4"})
    assert config.limits == LimitsSection(max_n=4)
