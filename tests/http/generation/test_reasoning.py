"""Reasoning as responses and messages show it: an item, a block, tokens of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent

from src.core.errors import RequestAbortedError
from src.core.outputs import Completion, Delta, FinishReason, Usage
from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine
from src.http.chat.handlers import ChatJob
from src.http.generation.content_blocks import BlockBegin, BlockDelta, BlockEnd, ContentBlockReader
from src.http.generation.generation import EventEncoder
from src.http.generation.reasoning_tokens import ReasoningTokens
from src.http.messages.encoder import MessageEncoder
from src.http.protocol.chat import ChatRequest
from src.http.protocol.responses import ResponseRequest
from src.http.responses.encoder import ResponseEncoder
from src.http.responses.translation import Translation
from src.text.answer import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from src.text.answer_plan import AnswerPlan
from src.text.reasoning import REASONING_SYNTAXES
from tests.http.strict import events_of, strictly

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

PIECES = ["<think>I wo", "nder.</thi", "nk>Yes", "!"]
USAGE = Usage(prompt_tokens=7, completion_tokens=16, cached_tokens=3)


def deltas(chat: ChatJob) -> list[Delta]:
    last = len(PIECES) - 1
    return [
        Delta(
            request_id="x",
            index=0,
            text=text,
            token_ids=chat.engine.tokenizer.encode(text, add_special_tokens=False),
            finish_reason=FinishReason.STOP if i == last else None,
            usage=Usage(prompt_tokens=7, completion_tokens=4 * (i + 1), cached_tokens=3),
        )
        for i, text in enumerate(PIECES)
    ]


@pytest.fixture
def chat(engine: AsyncEngine) -> ChatJob:
    plan = AnswerPlan(
        structured_output=None,
        kept_special_token_ids=(),
        forces_calls=False,
        functions={},
        parallel=True,
        calls=None,
        eager=False,
        certain=False,
        reasoning=REASONING_SYNTAXES["think"],
        reasoning_is_open=False,
    )
    return ChatJob(engine=engine, model="tiny", prompts=[("x", SamplingParams())], plan=plan)


def events_of_all(shape: EventEncoder, chat: ChatJob) -> bytes:
    return b"".join([shape.events(0, delta) for delta in deltas(chat)])


@pytest.fixture
def response(chat: ChatJob) -> ResponseEncoder:
    translation = Translation(ChatRequest(messages=[]), [], {})
    return ResponseEncoder(ResponseRequest(input="x"), translation, chat)


async def test_a_response_has_it_as_an_item_of_its_own(
    response: ResponseEncoder, chat: ChatJob
) -> None:
    text = b"".join((*response.opening(), events_of_all(response, chat), *response.ending(USAGE)))
    events = [strictly(ResponseStreamEvent, data) for _, data in events_of(text.decode())]
    kinds = [event.type.removeprefix("response.") for event in events]
    middle = [kind for kind in kinds if not kind.endswith(".delta")]
    assert middle == [
        "created", "in_progress",
        "output_item.added", "content_part.added",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added",
        "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thought) == "I wonder."
    final: Response = events[-1].response
    reasoning, message = final.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "I wonder.")
    assert (message.type, final.output_text) == ("message", "Yes!")
    assert final.usage is not None
    # Of the tokens, those that begin between the tags.
    data = [
        chat.engine.tokenizer.token_bytes(token_id)
        for delta in deltas(chat)
        for token_id in delta.token_ids
    ]
    begins = [len(b"".join(data[:index])) for index in range(len(data))]
    within = range(len("<think>"), len("<think>I wonder."))
    thought = sum(begin in within for begin in begins)
    assert final.usage.output_tokens_details.reasoning_tokens == thought > 4
    assert final.usage.input_tokens_details.cached_tokens == 3
    turn = response.message
    assert (turn.content, turn.reasoning_content, turn.tool_calls) == ("Yes!", "I wonder.", None)


async def test_a_message_has_it_as_a_block_of_its_own(chat: ChatJob) -> None:
    shape = MessageEncoder(chat)
    text = (events_of_all(shape, chat) + shape.ending(USAGE)).decode()
    events = [
        strictly(RawMessageStreamEvent, data) for name, data in events_of(text) if name != "ping"
    ]
    begun = [e.content_block.type for e in events if e.type == "content_block_start"]
    assert begun == ["thinking", "text"]
    pieces = [e.delta for e in events if e.type == "content_block_delta"]
    thought = "".join(piece.thinking for piece in pieces if piece.type == "thinking_delta")
    assert thought == "I wonder."
    completion = Completion(
        index=0, text="".join(PIECES), token_ids=[1] * 16, finish_reason=FinishReason.STOP
    )
    whole = strictly(Message, MessageEncoder(chat).body(completion, USAGE))
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].thinking == "I wonder."
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (4, 3)


async def test_blocks_open_and_close_one_after_another() -> None:
    reader = ContentBlockReader()
    events: list[Any] = reader.feed(
        [
            ReasoningDelta("a"),
            ReasoningDelta("b"),
            ContentDelta("c"),
            ToolCallBegin(0, "id0", "f"),
            ToolCallArguments(0, "{}"),
            ToolCallBegin(1, "id1", "g"),
            ContentDelta(""),
            ContentDelta("d"),
        ]
    )
    events += reader.finish()
    shape = [(type(event).__name__, event.block.index) for event in events]
    begin, delta, end = (kind.__name__ for kind in (BlockBegin, BlockDelta, BlockEnd))
    assert shape == [
        (begin, 0), (delta, 0), (delta, 0), (end, 0),
        (begin, 1), (delta, 1), (end, 1),
        (begin, 2), (delta, 2), (end, 2),
        (begin, 3), (end, 3),
        (begin, 4), (delta, 4), (end, 4),
    ]  # fmt: skip
    assert [(b.kind, b.text) for b in reader.blocks] == [
        ("reasoning", "ab"), ("text", "c"), ("call", "{}"), ("call", ""), ("text", "d"),
    ]  # fmt: skip
    assert [block.kind for block in _finished(ContentBlockReader())] == ["text"]


def _finished(reader: ContentBlockReader) -> list[Any]:
    reader.finish()
    return reader.blocks


async def test_reasoning_is_counted_in_tokens_whatever_is_shown(chat: ChatJob) -> None:
    tokenizer = chat.engine.tokenizer
    call = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 50
    token_ids = tokenizer.encode(f"<think>a b c</think>{call}", add_special_tokens=False)
    whole = ReasoningTokens(chat.plan, tokenizer)
    whole.count(token_ids)
    one_by_one = ReasoningTokens(chat.plan, tokenizer)
    for token_id in token_ids:
        one_by_one.count([token_id])
    thought = tokenizer.encode("a b c", add_special_tokens=False)
    assert whole.tokens == one_by_one.tokens == len(thought)


async def test_a_call_that_was_cut_short_has_no_arguments(chat: ChatJob) -> None:
    from src.http.messages.encoder import _arguments

    for text in ("", "{", '{"a": 1', "[1]", "5", '{"a":' * 5000):
        assert _arguments(text) == {}
    assert _arguments('{"a": [1]}') == json.loads('{"a": [1]}')


def test_what_was_cancelled_is_not_completed(response: ResponseEncoder, chat: ChatJob) -> None:
    for delta in deltas(chat):
        response.events(0, delta)
    response.cancelled()
    with pytest.raises(RequestAbortedError):
        list(response.finish(USAGE))
    assert response.response.status == "cancelled"
