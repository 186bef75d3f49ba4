"""Every answer is what the `openai` package's own types say, with nothing converted.

Fields on top of them are vLLM's and no others: a client that knows only OpenAI's passes over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    },
}
# Of vLLM: each only where it was asked for, but for the reason of a stop.
KNOWN = {"stop_reason", "token_ids", "prompt_token_ids", "reasoning"}

CHATS: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 1, "seed": 1},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": True},
    {"stop": ["e"]},
    {"response_format": {"type": "json_object"}},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"return_token_ids": True},
    {"metadata": {"a": "b"}, "store": True, "user": "me", "service_tier": "auto"},
]
# Not echo with logprobs: there the API itself has null for the first token, which its type denies.
TEXTS: list[dict[str, Any]] = [
    {},
    {"prompt": ["once", "upon"], "n": 2, "temperature": 1},
    {"prompt": [5, 6, 7], "logprobs": 2},
    {"echo": True},
    {"echo": True, "max_tokens": 0},
    {"return_token_ids": True},
    {"logprobs": 1, "return_tokens_as_token_ids": True},
]


def extras(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for item in value.__dict__.values():
            yield from extras(item)
    elif isinstance(value, list):
        for item in value:
            yield from extras(item)


def strictly(kind: type[BaseModel], text: str | bytes) -> Any:
    value = kind.model_validate_json(text, strict=True)
    assert set(extras(value)) <= KNOWN
    return value


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    answer = await client.post(
        path, json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return lines


@pytest.mark.parametrize("fields", CHATS, ids=str)
async def test_chats(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    body = {"messages": HELLO, "max_tokens": 24, "temperature": 0, **fields}
    answer = await client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    whole: ChatCompletion = strictly(ChatCompletion, answer.content)
    assert [choice.index for choice in whole.choices] == list(range(fields.get("n", 1)))
    chunks: list[ChatCompletionChunk] = [
        strictly(ChatCompletionChunk, line) for line in await streamed(client, CHAT, body)
    ]
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        text = "".join(piece.delta.content or "" for piece in pieces)
        assert text == (choice.message.content or "")
        assert [p.finish_reason for p in pieces if p.finish_reason] == [choice.finish_reason]


@pytest.mark.parametrize("fields", TEXTS, ids=str)
async def test_completions(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    body = {"prompt": "once upon", "max_tokens": 8, "temperature": 0, "seed": 1, **fields}
    answer = await client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    whole: Completion = strictly(Completion, answer.content)
    lines = await streamed(client, COMPLETIONS, body)
    # The API has null here until the end; the type of a whole answer stands for its events too.
    lines = [line.replace('"finish_reason":null', '"finish_reason":"stop"') for line in lines]
    events: list[Completion] = [strictly(Completion, line) for line in lines]
    assert not events[-1].choices
    for choice in whole.choices:
        pieces = [c for event in events for c in event.choices if c.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert pieces[-1].finish_reason == choice.finish_reason


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    for entry in listed["data"]:
        model = Model.model_validate(entry, strict=True)
        answer = await client.get(f"/v1/models/{model.id}")
        assert Model.model_validate_json(answer.content, strict=True) == model
