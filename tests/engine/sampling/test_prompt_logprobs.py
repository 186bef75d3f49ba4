"""Which positions of a step are scored, for whom, and as which tokens."""

from __future__ import annotations

import pytest
import torch

from src.core.plan import RowInstall, RowStep, StepPlan
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.sampling import prompt_logprobs
from src.engine.sampling.prompt_logprobs import asks_for_scores, score_prompts, still_unscored

V, HIDDEN = 23, 8


def asking(prompt_len: int, top: int | None) -> DeviceRequest:
    return DeviceRequest(
        key=prompt_len, prompt_len=prompt_len, params=SamplingParams(prompt_logprobs=top)
    )


@pytest.mark.parametrize("at_once", [2, 128])
def test_each_row_has_the_scores_of_its_own_prompt(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "_SLICE", at_once)
    random = torch.Generator().manual_seed(7)
    # A decode, a whole prompt, one of nobody who asks, and the second chunk of a prompt.
    steps = [
        RowStep(2, 1, 6, 1, True),
        RowStep(0, 1, 0, 5, True),
        RowStep(3, 1, 0, 4, True),
        RowStep(1, 1, 4, 3, False),
    ]
    unscored = [asking(5, 2), asking(9, 0), asking(6, 3), None]
    hidden = torch.randn(sum(step.num_tokens for step in steps), HIDDEN, generator=random)
    head = torch.randn(HIDDEN, V, generator=random)
    tokens = torch.randint(0, V, (5, 16), generator=random, dtype=torch.int32)
    plan = StepPlan(1, [], [], steps)
    assert asks_for_scores(plan, unscored)
    scores = score_prompts(plan, unscored, hidden, tokens, lambda x: x @ head)
    assert scores is not None
    expected = (hidden @ head).log_softmax(1)
    # Row 0 begins behind the decode, row 1 behind all others.
    for index, row, first, start, count, top in ((1, 0, 1, 0, 4, 2), (3, 1, 10, 4, 3, 0)):
        found = scores.to_host().of_row(index)
        assert found is not None
        wanted = tokens[row, start + 1 : start + 1 + count].tolist()
        assert [score.token_id for score in found] == wanted
        places = [expected[first + i, token].item() for i, token in enumerate(wanted)]
        assert [score.logprob for score in found] == pytest.approx(places, abs=1e-5)
        assert {len(score.top) for score in found} == {top}
    # What follows the last position of a prompt is none of it, and a decode has none.
    assert scores.of_row(0) is None
    assert scores.of_row(2) is None
    assert score_prompts(StepPlan(1, [], [], steps[:1]), unscored, hidden, tokens, len) is None


@pytest.mark.parametrize(
    ("top", "num_tokens", "waits"), [(0, 5, True), (2, 5, True), (2, 6, False), (None, 5, False)]
)
def test_who_resumes_with_output_has_its_scores(
    top: int | None, num_tokens: int, waits: bool
) -> None:
    request = asking(5, top)
    install = RowInstall(0, 1, 5, list(range(num_tokens)), 5, [[0]])
    assert still_unscored(request, install) == (request if waits else None)
