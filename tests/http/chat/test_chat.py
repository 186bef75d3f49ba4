from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine
from src.engine.requests.prompts import ChatOptions

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

MESSAGES = [{"role": "user", "content": "Tell me about 漢字, please."}]


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 10, **fields}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 10, **fields, "stream": True}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    *events, done, empty = answer.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def content_of(body: dict[str, Any]) -> str:
    content: str = body["choices"][0]["message"]["content"]
    return content


async def test_an_answer_is_what_the_engine_generates(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    body = await chat(client)
    expected = await engine.generate(MESSAGES, SamplingParams(temperature=0.0, max_tokens=10))
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": expected.text, "refusal": None}
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert body["id"].startswith("chatcmpl-")
    assert body["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


async def test_a_stream_begins_with_the_role_and_joins_to_the_answer(
    client: httpx.AsyncClient,
) -> None:
    whole = content_of(await chat(client, max_tokens=40, ignore_eos=True))
    first, *others = await stream(client, max_tokens=40, ignore_eos=True)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in others) == whole
    assert all("role" not in event["choices"][0]["delta"] for event in others)
    assert others[-1]["choices"][0]["finish_reason"] == "length"
    assert first["object"] == "chat.completion.chunk"


async def test_usage_of_a_stream(client: httpx.AsyncClient) -> None:
    *events, last = await stream(
        client, n=2, ignore_eos=True, stream_options={"include_usage": True}
    )
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 20)
    assert all(event["usage"] is None for event in events)


async def test_n_answers_differ_and_each_has_an_index(client: httpx.AsyncClient) -> None:
    body = await chat(client, n=3, temperature=1.5, seed=5, ignore_eos=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 3
    roles = [
        event["choices"][0]["index"]
        for event in await stream(client, n=3)
        if "role" in event["choices"][0]["delta"]
    ]
    assert sorted(roles) == [0, 1, 2]


async def test_as_many_tokens_as_fit_are_the_default(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    prompt = await engine.tokenize(MESSAGES)
    long = [{"role": "user", "content": "abc " * 300}]
    used = len(await engine.tokenize(long))
    assert used > len(prompt)
    body = await chat(client, messages=long, max_tokens=None, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == engine.model_info.max_model_len - used


async def test_both_names_of_the_token_limit(client: httpx.AsyncClient) -> None:
    fields = {"max_tokens": 9, "max_completion_tokens": 4, "ignore_eos": True}
    assert (await chat(client, **fields))["usage"]["completion_tokens"] == 4


async def test_logprobs_have_the_chat_shape(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 5, "ignore_eos": True}
    entries = (await chat(client, **fields))["choices"][0]["logprobs"]["content"]
    assert len(entries) == 5
    for entry in entries:
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"])
        assert len(entry["top_logprobs"]) == 2
        # A part of a character is spelt by its bytes.
        assert bytes(entry["bytes"]).decode(errors="backslashreplace") == entry["token"]
    streamed = [
        entry
        for event in await stream(client, **fields)
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
    alone = await chat(client, logprobs=True, max_tokens=1)
    assert alone["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_content_may_be_text_parts(client: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    as_parts = await chat(client, messages=[{"role": "user", "content": parts}])
    as_text = await chat(client, messages=[{"role": "user", "content": "one\ntwo"}])
    assert content_of(as_parts) == content_of(as_text)


async def test_a_developer_is_the_system(client: httpx.AsyncClient) -> None:
    answers = [
        content_of(await chat(client, messages=[{"role": role, "content": "Be brief."}, *MESSAGES]))
        for role in ("system", "developer")
    ]
    assert answers[0] == answers[1]


async def test_an_answer_can_be_continued(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    body = await chat(
        client, messages=messages, continue_final_message=True, add_generation_prompt=False
    )
    options = ChatOptions(continue_final_message=True, add_generation_prompt=False)
    expected = await engine.generate(
        messages, SamplingParams(temperature=0.0, max_tokens=10), chat=options
    )
    assert content_of(body) == expected.text
    assert body["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


async def test_a_tool_conversation_is_rendered(client: httpx.AsyncClient) -> None:
    function = {"name": "look_up", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    tools = [{"type": "function", "function": function}]
    for choice in ("auto", "none", None):
        body = await chat(client, messages=messages, tools=tools, tool_choice=choice)
        assert body["choices"][0]["finish_reason"] in ("stop", "length")


async def test_a_field_of_tools_is_about_the_tools_that_are_given(
    client: httpx.AsyncClient,
) -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    lax = {"type": "function", "function": {"name": "f", "strict": False}}
    await chat(client, tools=[strict], tool_choice="none", parallel_tool_calls=False)
    await chat(client, tools=[lax], parallel_tool_calls=True)


async def test_fields_without_a_meaning_here_are_accepted(client: httpx.AsyncClient) -> None:
    plain = content_of(await chat(client))
    fields = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "verbosity": "low",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": False,
        "something_of_the_future": 1,
    }
    assert content_of(await chat(client, **fields)) == plain
