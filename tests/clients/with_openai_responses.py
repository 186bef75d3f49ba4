"""The `openai` package's responses, with every event checked against its types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.clients.common import (
    ADD,
    BASE_URL,
    FACT,
    FACT_ANSWER,
    KEY,
    MODEL,
    PERSON,
    SUM,
    SUM_ANSWER,
    WEATHER,
    parameters,
)

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, _strict_response_validation=True)
ASK = {"model": MODEL, "temperature": 0}
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
GET_WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": parameters(city="string"),
    "strict": True,
}
ADD_NUMBERS: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": parameters(a="integer", b="integer"),
    "strict": False,
}

# A type that Codex sends and only OpenAI's models know: it is passed over.
CODEX_NAMESPACE = {"type": "namespace", "name": "agents", "description": "", "tools": [ADD_NUMBERS]}


class Person(pydantic.BaseModel):
    name: str
    price: int


def test_a_response() -> None:
    response = client.responses.create(input=SUM, **ASK)
    assert response.output_text == SUM_ANSWER
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens >= 0
    assert response.usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"instructions": "You are Slip.", "store": False, "include": [], "truncation": "auto"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": SUM}]}]},
        {"input": WEATHER, "tools": [GET_WEATHER, {"type": "web_search"}, CODEX_NAMESPACE]},
        {"max_output_tokens": 16, "top_p": 0.9, "reasoning": {"effort": "low"}},
        {"text": {"format": {"type": "json_object"}}, "input": PERSON},
    ],
)
def test_responses_strictly(fields: dict[str, Any]) -> None:
    body = {**ASK, "input": SUM, **fields}
    answer = httpx.post(f"{BASE_URL}/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    whole = Response.model_validate_json(answer.content, strict=True)
    streamed = httpx.post(f"{BASE_URL}/responses", json={**body, "stream": True}, timeout=60)
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
    events = [EVENTS.validate_json(line, strict=True) for line in lines if line != "[DONE]"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == whole.output_text
    assert [item.type for item in events[-1].response.output] == [i.type for i in whole.output]


def test_a_stream_with_its_helper() -> None:
    with client.responses.stream(input=FACT, **ASK) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == FACT_ANSWER
    assert len(deltas) > 2


def test_tools() -> None:
    first = client.responses.create(input=ADD, tools=[ADD_NUMBERS], **ASK)
    (call,) = (item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 123, "b": 456})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "579"}
    again: list[Any] = [{"role": "user", "content": ADD}, *first.output, result]
    second = client.responses.create(input=again, tools=[ADD_NUMBERS], store=False, **ASK)
    assert second.output_text == "The result is 579."
    third = client.responses.create(
        input=[result], previous_response_id=first.id, tools=[ADD_NUMBERS], **ASK
    )
    assert third.output_text == "The result is 579."


def test_a_conversation_goes_on_by_its_id() -> None:
    first = client.responses.create(input="My name is Lily.", **ASK)
    second = client.responses.create(input="What is my name?", previous_response_id=first.id, **ASK)
    assert second.output_text == "Your name is Lily."
    assert client.responses.retrieve(second.id) == second
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_nobody")


def test_parse() -> None:
    parsed = client.responses.parse(input=PERSON, text_format=Person, **ASK)
    assert parsed.output_parsed == Person(name="Rosa", price=27)
