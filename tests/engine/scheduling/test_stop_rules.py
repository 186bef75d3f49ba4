from __future__ import annotations

import pytest

from src.core.outputs import FinishReason
from src.engine.scheduling.stop_rules import finish_reason
from tests.engine.scheduling.fake_worker import END_TOKEN
from tests.engine.scheduling.simulation import make_request


@pytest.mark.parametrize(
    ("token", "num_output", "min_tokens", "expected"),
    [
        (3, 1, 0, None),
        (END_TOKEN, 1, 0, FinishReason.STOP),
        (END_TOKEN, 2, 2, None),
        (END_TOKEN, 3, 2, FinishReason.STOP),
        (3, 5, 0, FinishReason.LENGTH),
        (END_TOKEN, 5, 0, FinishReason.STOP),
        (END_TOKEN, 5, 5, FinishReason.LENGTH),
    ],
)
def test_finish_reason(
    token: int, num_output: int, min_tokens: int, expected: FinishReason | None
) -> None:
    request = make_request(0, 1, max_tokens=5, min_tokens=min_tokens)
    assert finish_reason(request, token, num_output) is expected


def test_without_end_tokens_only_the_length_ends() -> None:
    request = make_request(0, 1, max_tokens=2, ends=False)
    assert finish_reason(request, END_TOKEN, 1) is None
    assert finish_reason(request, END_TOKEN, 2) is FinishReason.LENGTH
