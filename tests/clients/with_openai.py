"""The `openai` package, synchronous and asynchronous, and its answers against its own types."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.clients.common import (
    ADD,
    ADD_NUMBERS,
    BASE_URL,
    FACT,
    FACT_ANSWER,
    GET_WEATHER,
    KEY,
    MODEL,
    PERSON,
    STORY,
    SUM,
    SUM_ANSWER,
    WEATHER,
    user,
)

# The client reads leniently by default; this makes it refuse what its types do not allow.
client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, _strict_response_validation=True)
CHAT = {"model": MODEL, "temperature": 0}


class Person(pydantic.BaseModel):
    name: str
    price: int


class Weather(pydantic.BaseModel):
    """Get the weather in a city."""

    city: str


def strict(kind: type[pydantic.BaseModel], path: str, **body: Any) -> Any:
    """The answer's own bytes against the package's type, without any conversion."""
    answer = httpx.post(f"{BASE_URL}/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return kind.model_validate_json(answer.content, strict=True)


def strict_events(kind: type[pydantic.BaseModel], path: str, **body: Any) -> list[Any]:
    """The same for every event of a stream, which ends as it must."""
    answer = httpx.post(f"{BASE_URL}/{path}", json={**body, "stream": True}, timeout=60)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    if kind is Completion:
        # The API has null here until the end; the type of a whole answer stands for its events too.
        lines = [line.replace('"finish_reason":null', '"finish_reason":"stop"') for line in lines]
    return [kind.model_validate_json(line, strict=True) for line in lines]


def test_models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    raw = httpx.get(f"{BASE_URL}/models/{MODEL}").content
    assert Model.model_validate_json(raw, strict=True) == client.models.retrieve(MODEL)


def test_chat() -> None:
    answer = client.chat.completions.create(messages=user(SUM), **CHAT)
    assert answer.choices[0].message.content == SUM_ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 3, "n": 2, "seed": 1, "temperature": 1},
        {"tools": [GET_WEATHER, ADD_NUMBERS], "tool_choice": "required", "max_tokens": 200},
        {"metadata": {"a": "b"}, "store": True, "user": "me", "service_tier": "auto"},
    ],
)
def test_chat_strictly(fields: dict[str, Any]) -> None:
    body = {**CHAT, "messages": user(WEATHER), "max_tokens": 40, **fields}
    whole: ChatCompletion = strict(ChatCompletion, "chat/completions", **body)
    assert len(whole.choices) == fields.get("n", 1)
    events = strict_events(
        ChatCompletionChunk, "chat/completions", stream_options={"include_usage": True}, **body
    )
    # Not the details: the second of two equal prompts is in the cache.
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert not events[-1].choices
    for index, choice in enumerate(whole.choices):
        pieces = [c for e in events for c in e.choices if c.index == index]
        text = "".join(piece.delta.content or "" for piece in pieces)
        assert text == (choice.message.content or "")
        assert pieces[-1].finish_reason == choice.finish_reason


def test_completions() -> None:
    body = {"model": MODEL, "prompt": [STORY, "The sun"], "temperature": 0, "max_tokens": 8}
    whole: Completion = strict(Completion, "completions", **body, logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens is not None
    assert len(whole.choices[0].logprobs.tokens) == 8
    events = strict_events(Completion, "completions", **body)
    text = "".join(choice.text for event in events for choice in event.choices if not choice.index)
    assert text == whole.choices[0].text
    assert client.completions.create(**body).choices[0].text == text


def test_echo() -> None:
    """A first token has no log-probability: null in the API, and unknown to the types."""
    lenient = openai.OpenAI(base_url=BASE_URL, api_key=KEY)
    (choice,) = lenient.completions.create(
        model=MODEL, prompt=STORY, temperature=0, max_tokens=1, echo=True, logprobs=1
    ).choices
    assert choice.text.startswith(STORY)
    assert choice.logprobs is not None
    first, *rest = choice.logprobs.token_logprobs or ()
    assert first is None
    assert all(value <= 0 for value in rest)


def test_a_stream_with_its_helper() -> None:
    with client.chat.completions.stream(
        messages=user(FACT), stream_options={"include_usage": True}, **CHAT
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == FACT_ANSWER
    assert len(deltas) > 2
    assert final.usage is not None


def test_tools() -> None:
    tools = [GET_WEATHER, ADD_NUMBERS]
    first = client.chat.completions.create(messages=user(ADD), tools=tools, **CHAT)
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = first.choices[0].message.tool_calls or ()
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, arguments) == ("add", {"a": 123, "b": 456})
    messages = [
        *user(ADD),
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))},
    ]
    second = client.chat.completions.create(messages=messages, tools=tools, **CHAT)
    assert second.choices[0].message.content == "The result is 579."


def test_tools_in_a_stream() -> None:
    with client.chat.completions.stream(
        messages=user(WEATHER), tools=[GET_WEATHER], **CHAT
    ) as stream:
        arguments = [
            event.arguments
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert arguments


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_tool_that_must_be_called(choice: Any) -> None:
    answer = client.chat.completions.create(
        messages=user(ADD), tools=[ADD_NUMBERS], tool_choice=choice, max_tokens=200, **CHAT
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"a": 123, "b": 456}


def test_response_format() -> None:
    answer = client.chat.completions.create(
        messages=user(PERSON), response_format={"type": "json_object"}, **CHAT
    )
    assert json.loads(answer.choices[0].message.content or "") == {"name": "Rosa", "price": 27}


def test_parse() -> None:
    parsed = client.chat.completions.parse(messages=user(PERSON), response_format=Person, **CHAT)
    assert parsed.choices[0].message.parsed == Person(name="Rosa", price=27)


def test_parse_tools() -> None:
    parsed = client.chat.completions.parse(
        messages=user(WEATHER),
        tools=[openai.pydantic_function_tool(Weather, name="get_weather")],
        **CHAT,
    )
    (call,) = parsed.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Paris")


def test_parse_in_a_stream() -> None:
    with client.chat.completions.stream(
        messages=user(PERSON), response_format=Person, **CHAT
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Rosa", price=27)


def test_errors_are_what_the_client_knows() -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=user(SUM))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=user(SUM), temperature=3)
    assert bad.value.param == "temperature"


def test_async() -> None:
    async def ask(aclient: openai.AsyncOpenAI, text: str) -> str:
        stream = await aclient.chat.completions.create(messages=user(text), stream=True, **CHAT)
        async with stream:
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=BASE_URL, api_key=KEY, _strict_response_validation=True
        ) as aclient:
            whole = await aclient.chat.completions.create(messages=user(SUM), **CHAT)
            streams = await asyncio.gather(*(ask(aclient, t) for t in [SUM, FACT] * 8))
            parsed = await aclient.chat.completions.parse(
                messages=user(PERSON), response_format=Person, **CHAT
            )
            assert parsed.choices[0].message.parsed == Person(name="Rosa", price=27)
            return [whole.choices[0].message.content or "", *streams]

    assert asyncio.run(main()) == [SUM_ANSWER, *[SUM_ANSWER, FACT_ANSWER] * 8]


def test_embeddings() -> None:
    # The client asks for base64 by itself, and decodes it; by its types there are numbers only.
    lenient = openai.OpenAI(base_url=BASE_URL, api_key=KEY)
    made = lenient.embeddings.create(model=MODEL, input=[STORY, SUM])
    plain = client.embeddings.create(model=MODEL, input=[STORY, SUM], encoding_format="float")
    assert made.usage.prompt_tokens == plain.usage.prompt_tokens > 0
    for one, other in zip(made.data, plain.data, strict=True):
        assert one.index == other.index
        assert one.embedding == pytest.approx(other.embedding)
    strict(CreateEmbeddingResponse, "embeddings", model=MODEL, input=STORY)
    with pytest.raises(openai.BadRequestError, match="must not be empty"):
        client.embeddings.create(model=MODEL, input=[STORY, ""])
