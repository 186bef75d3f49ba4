"""The `anthropic` package: messages, streams, tools, counting tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from tests.clients.common import (
    ADD,
    FACT,
    FACT_ANSWER,
    KEY,
    MODEL,
    SUM,
    SUM_ANSWER,
    URL,
    WEATHER,
    parameters,
    user,
)

# It adds /v1 by itself.
client = anthropic.Anthropic(base_url=URL, api_key=KEY, _strict_response_validation=True)
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "temperature": 0}
# The package no longer has a parameter for the temperature.
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "extra_body": {"temperature": 0}}
ADD_NUMBERS: Any = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": parameters(a="integer", b="integer"),
}
GET_WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": parameters(city="string"),
}


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "You are Slip."},
        {"system": [{"type": "text", "text": "You are Slip."}], "metadata": {"user_id": "me"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": SUM}]}]},
        {"tools": [ADD_NUMBERS, GET_WEATHER], "messages": user(WEATHER)},
        {"stop_sequences": ["156"], "top_k": 5, "top_p": 0.9},
    ],
)
def test_messages_strictly(fields: dict[str, Any]) -> None:
    answer = httpx.post(
        f"{URL}/v1/messages",
        json={**BODY, "messages": user(SUM), **fields},
        headers={"anthropic-version": "2023-06-01", "x-api-key": KEY},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    message = Message.model_validate_json(answer.content, strict=True)
    assert message.stop_reason in ("end_turn", "tool_use", "stop_sequence")


def test_a_message() -> None:
    message = client.messages.create(messages=user(SUM), **ASK)
    assert text_of(message) == SUM_ANSWER
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0


def test_a_stream_with_its_helper() -> None:
    with client.messages.stream(messages=user(FACT), **ASK) as stream:
        deltas = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(deltas) == text_of(final) == FACT_ANSWER
    assert len(deltas) > 2


def test_tools() -> None:
    first = client.messages.create(messages=user(ADD), tools=[ADD_NUMBERS], **ASK)
    assert first.stop_reason == "tool_use"
    (call,) = (block for block in first.content if block.type == "tool_use")
    assert (call.name, call.input) == ("add", {"a": 123, "b": 456})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "579"}
    again: list[Any] = [
        *user(ADD),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(messages=again, tools=[ADD_NUMBERS], **ASK)
    assert text_of(second) == "The result is 579."


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_tool_that_must_be_called(choice: Any) -> None:
    message = client.messages.create(
        messages=user(ADD), tools=[ADD_NUMBERS], tool_choice=choice, **{**ASK, "max_tokens": 200}
    )
    (call,) = (block for block in message.content if block.type == "tool_use")
    assert call.input == {"a": 123, "b": 456}


def test_tools_in_a_stream() -> None:
    with client.messages.stream(messages=user(WEATHER), tools=[GET_WEATHER], **ASK) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (call,) = (block for block in final.content if block.type == "tool_use")
    assert call.input == {"city": "Paris"}
    assert pieces


def test_counting_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=user(SUM))
    message = client.messages.create(messages=user(SUM), **ASK)
    assert counted.input_tokens == message.usage.input_tokens


def test_errors_are_what_the_client_knows() -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(messages=user(SUM), **{**ASK, "model": "other"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(messages=user(SUM), **{**ASK, "extra_body": {"temperature": 3}})


def test_async() -> None:
    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY) as aclient:
            answers = await asyncio.gather(
                *(aclient.messages.create(messages=user(SUM), **ASK) for _ in range(8))
            )
            return [text_of(answer) for answer in answers]

    assert asyncio.run(main()) == [SUM_ANSWER] * 8
