"""A completion's events become deltas: what of tokens, text and scores a reader is shown."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from src.core.outputs import Delta, FinishReason, RequestEvent, TokenLogprobs
from src.core.request import Request
from src.core.sampling_params import SamplingParams
from src.core.settings import CHECKOUT
from src.engine.requests.submission import Submission
from src.text import Tokenizer

pytestmark = pytest.mark.timeout(120)

TOKENIZER = Tokenizer.from_directory(CHECKOUT / "configs" / "demo")
TEXT = "one two three four"
TOKENS = TOKENIZER.encode(TEXT)
SCORES = [TokenLogprobs(token_id, -1.0, 1, ()) for token_id in TOKENS]


def submission(number: int = 1, prediction: bytes | None = None, **params: object) -> Submission:
    request = Request(
        key=0,
        prompt_token_ids=[5, 6],
        params=SamplingParams(**params),  # type: ignore[arg-type]
        max_tokens=99,
        end_token_ids=frozenset(params.get("stop_token_ids", ())),  # type: ignore[call-overload]
        prediction=prediction,
    )
    requests = [msgspec.structs.replace(request, key=key) for key in range(number)]
    return Submission(None, TOKENIZER, "r", requests)  # type: ignore[arg-type]


def taken(given: Submission, *events: RequestEvent) -> list[Delta]:
    """Deltas of the first event of each completion."""
    for event in events:
        given.choices[event.key].take(event)
    return asyncio.run(given.take())


def event(token_ids: list[int], key: int = 0, **fields: object) -> RequestEvent:
    return RequestEvent(key=key, token_ids=token_ids, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("included", [False, True])
def test_tokens_and_scores_behind_a_stop_string_are_dropped(included: bool) -> None:
    given = submission(stop=("two",), include_stop_str_in_output=included)
    (delta,) = taken(given, event(TOKENS, logprobs=SCORES))
    until = next(n for n in range(len(TOKENS)) if "two" in TOKENIZER.decode(TOKENS[:n]))
    assert 0 < until < len(TOKENS)
    assert delta.token_ids == TOKENS[:until]
    assert delta.logprobs == SCORES[:until]
    assert delta.text == ("one two" if included else "one ")
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "two")
    assert delta.usage is not None
    assert delta.usage.completion_tokens == given.choices[0].num_tokens == until


@pytest.mark.parametrize("stop", [(), ("two",), ("four",), ("elsewhere",)])
def test_right_drafts_behind_a_stop_string_count_as_none_of_the_output(
    stop: tuple[str, ...],
) -> None:
    given = submission(stop=stop, prediction=b"1234")
    drafts = {"drafted": len(TOKENS) + 1, "accepted": len(TOKENS) - 1, "source": "prediction"}
    (delta,) = taken(given, event(TOKENS, **drafts))
    # The last token is the model's own, unless the output ends before it.
    accepted = min(len(delta.token_ids), len(TOKENS) - 1)
    assert (accepted < len(TOKENS) - 1) == ("two" in stop)
    record = given.choices[0].record
    assert delta.usage.accepted_prediction_tokens == record.accepted == accepted
    assert record.drafted == len(TOKENS) + 1
    assert delta.usage.rejected_prediction_tokens == record.drafted - accepted
    assert given.choices[0].num_tokens == delta.usage.completion_tokens == len(delta.token_ids)


@pytest.mark.parametrize("included", [False, True])
def test_a_token_that_ends_the_output_has_text_only_if_it_is_wanted(included: bool) -> None:
    last = TOKENS[-1]
    given = submission(stop_token_ids=(last,), include_stop_str_in_output=included)
    (delta,) = taken(given, event(TOKENS, finish_reason=FinishReason.STOP, stop_token_id=last))
    assert delta.text == (TEXT if included else TOKENIZER.decode(TOKENS[:-1]))
    # It is one of the output's tokens all the same.
    assert delta.token_ids == TOKENS
    assert delta.stop_reason == last


def test_an_end_token_of_the_model_is_no_reason_of_the_request() -> None:
    last = TOKENS[-1]
    ending = event(TOKENS, finish_reason=FinishReason.STOP, stop_token_id=last)
    (delta,) = taken(submission(), ending)
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.STOP])
def test_what_was_held_back_comes_with_the_end(reason: FinishReason) -> None:
    given = submission(stop=("four score",))
    (before,) = taken(given, event(TOKENS))
    assert before.text == "one two three "
    (delta,) = taken(given, event([], finish_reason=reason))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("four", reason, None)


def test_the_first_completion_has_the_scores_of_the_prompt_and_what_was_cached() -> None:
    given = submission(2)
    events = [
        event(TOKENS[:1], key=key, prompt_logprobs=SCORES[:1], cached_tokens=16) for key in (1, 0)
    ]
    deltas = {delta.index: delta for delta in taken(given, events[0])}
    assert deltas[1].prompt_logprobs is None
    # What it finds the first one has computed.
    assert given.usage.cached_tokens == 0
    deltas = {delta.index: delta for delta in taken(given, events[1])}
    assert deltas[0].prompt_logprobs == [None, *SCORES[:1]]
    assert given.usage.cached_tokens == 16
    assert given.usage.completion_tokens == 2


def test_its_text_is_followed_only_where_it_may_end_it() -> None:
    assert not submission().choices[0].watches_text
    assert submission(stop=("x",)).choices[0].watches_text
