"""``/v1/messages``, validated by the types of Anthropic's client."""

from __future__ import annotations

import importlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from starlette.applications import Starlette

from src.engine.client import AsyncEngine
from tests.http.asking import client_of
from tests.http.server.refusals import (
    ENDLESS,
    HUGE,
    TOO_LARGE_FLOAT,
    WRONG_LISTS,
    WRONG_NUMBERS,
    WRONG_TEXTS,
    WRONG_TRUTHS,
)
from tests.http.strict import events_of, strictly

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

PATH = "/v1/messages"
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
USER = {"role": "user", "content": "Tell me"}
ASKS_WEATHER = {"role": "user", "content": "What is the weather in Paris?"}


@pytest.fixture
async def demo(demo_app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(demo_app) as client:
        yield client


async def ask(client: httpx.AsyncClient, *messages: Any, **fields: Any) -> Message:
    body = {"messages": messages or [USER], "temperature": 0, "max_tokens": 12, **fields}
    answer = await client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    message: Message = strictly(Message, answer.content)
    return message


async def stream(client: httpx.AsyncClient, *messages: Any, **fields: Any) -> list[Any]:
    body = {"messages": messages or [USER], "temperature": 0, "max_tokens": 12, **fields}
    answer = await client.post(PATH, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for name, data in events_of(answer.text):
        if name == "ping":
            assert json.loads(data) == {"type": "ping"}
            continue
        event = strictly(RawMessageStreamEvent, data)
        assert event.type == name
        events.append(event)
    return events


async def chat(client: httpx.AsyncClient, messages: Any, **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def test_a_message_is_what_a_chat_answers(client: httpx.AsyncClient) -> None:
    message = await ask(client, USER, system="Be brief.", model="tiny")
    answer = await chat(client, [{"role": "system", "content": "Be brief."}, USER])
    assert text_of(message) == answer["choices"][0]["message"]["content"]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "tiny", "max_tokens")
    usage = message.usage
    assert usage.cache_read_input_tokens is not None
    assert usage.input_tokens + usage.cache_read_input_tokens == answer["usage"]["prompt_tokens"]
    assert usage.output_tokens == 12


async def test_blocks_are_the_messages_of_a_chat(client: httpx.AsyncClient) -> None:
    message = await ask(
        client,
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": None}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Hello"},
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        system=[{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}],
    )
    answer = await chat(
        client,
        [
            {"role": "system", "content": "One\n\nTwo"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."},
            {"role": "user", "content": "A\n\nB"},
        ],
    )
    assert text_of(message) == answer["choices"][0]["message"]["content"]


async def test_a_stream_has_every_event_in_order(client: httpx.AsyncClient) -> None:
    whole = await ask(client)
    events = await stream(client)
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 1
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, last = events[0].message, events[-2]
    assert start.content == []
    assert start.stop_reason is None
    assert start.usage.input_tokens + start.usage.cache_read_input_tokens > 0
    text = "".join(event.delta.text for event in events[2:-3])
    assert text == text_of(whole)
    assert (last.delta.stop_reason, last.usage.output_tokens) == ("max_tokens", 12)


async def test_a_stop_sequence_is_named(client: httpx.AsyncClient) -> None:
    text = text_of(await ask(client))
    sequence = text[3:5]
    message = await ask(client, stop_sequences=[sequence])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", sequence)
    assert text_of(message) == text.partition(sequence)[0]
    last = (await stream(client, stop_sequences=[sequence]))[-2]
    assert (last.delta.stop_reason, last.delta.stop_sequence) == ("stop_sequence", sequence)


async def test_a_last_message_of_the_assistant_is_continued(client: httpx.AsyncClient) -> None:
    beginning = {"role": "assistant", "content": "It is"}
    message = await ask(client, USER, beginning)
    answer = await chat(
        client, [USER, beginning], continue_final_message=True, add_generation_prompt=False
    )
    assert text_of(message) == answer["choices"][0]["message"]["content"]


async def test_the_model_uses_a_tool(demo: httpx.AsyncClient) -> None:
    fields = {"tools": [WEATHER], "max_tokens": 60}
    message = await ask(demo, ASKS_WEATHER, **fields)
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    events = await stream(demo, ASKS_WEATHER, **fields)
    pieces = [
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert json.loads("".join(pieces)) == use.input
    assert events[-2].delta.stop_reason == "tool_use"
    begun = [e.content_block for e in events if e.type == "content_block_start"][-1]
    assert (begun.type, begun.name, begun.input) == ("tool_use", "get_weather", {})
    # The result goes back as the API has it.
    following = await ask(
        demo,
        ASKS_WEATHER,
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": use.id, "name": use.name, "input": use.input},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": use.id,
                    "content": [{"type": "text", "text": "21 degrees"}],
                }
            ],
        },
        tools=[WEATHER],
    )
    function = {
        "name": "get_weather",
        "description": WEATHER["description"],
        "parameters": WEATHER["input_schema"],
    }
    call = {"name": "get_weather", "arguments": json.dumps(use.input)}
    by_hand = await chat(
        demo,
        [
            ASKS_WEATHER,
            {
                "role": "assistant",
                "tool_calls": [{"id": use.id, "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": use.id, "content": "21 degrees"},
        ],
        tools=[{"type": "function", "function": function}],
    )
    assert text_of(following) == (by_hand["choices"][0]["message"]["content"] or "")


async def test_a_tool_is_forced(demo: httpx.AsyncClient) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = await ask(demo, tools=[WEATHER], tool_choice=choice, max_tokens=60)
        assert [block.type for block in message.content] == ["tool_use"]
    message = await ask(demo, ASKS_WEATHER, tools=[WEATHER], tool_choice={"type": "none"})
    assert {block.type for block in message.content} == {"text"}


async def test_tools_that_run_elsewhere_are_passed_over(demo: httpx.AsyncClient) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {**WEATHER, "type": "custom"}]
    message = await ask(demo, ASKS_WEATHER, tools=tools, max_tokens=60)
    assert message.stop_reason == "tool_use"


async def test_the_text_has_the_form_that_was_asked_for(demo: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"warm": {"type": "boolean"}},
        "required": ["warm"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    message = await ask(demo, output_config=form, max_tokens=300)
    assert set(json.loads(text_of(message))) == {"warm"}


async def test_tokens_are_counted(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
    answer = await client.post(
        f"{PATH}/count_tokens", json={"messages": [USER], "system": "Be brief.", "model": "tiny"}
    )
    count = strictly(MessageTokensCount, answer.content)
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert count.input_tokens == len(await engine.tokenize(messages))


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
AGENT = "You are an agent of some kind. " * 8


def billed(form: str, nonce: str) -> Any:
    """A system prompt as Claude Code and proxies before it send it."""
    line = BILLING.format(nonce)
    if form == "text":
        return f"{line}\n{AGENT}"
    blocks = [line, AGENT] if form == "blocks" else [f"{line}\n{AGENT}"]
    return [{"type": "text", "text": text} for text in blocks]


@pytest.mark.parametrize("form", ["blocks", "text", "one block"])
async def test_a_billing_header_is_no_part_of_the_prompt(
    client: httpx.AsyncClient, engine: AsyncEngine, form: str
) -> None:
    user = {"role": "user", "content": f"Tell me of {form}"}
    prompt = await engine.tokenize([{"role": "system", "content": AGENT}, user])
    for nonce in ("fa690", "0aaa9"):
        body = {"messages": [user], "system": billed(form, nonce)}
        counted = await client.post(f"{PATH}/count_tokens", json=body)
        assert counted.json() == {"input_tokens": len(prompt)}
    usages = [(await ask(client, user, system=billed(form, n))).usage for n in ("1b2c3", "d4e5f")]
    assert {u.input_tokens + (u.cache_read_input_tokens or 0) for u in usages} == {len(prompt)}
    # All of it but the last, perhaps partial, block of the cache.
    assert (usages[1].cache_read_input_tokens or 0) >= len(prompt) - 16


async def test_a_header_that_is_talked_about_stays(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    system = "What does x-anthropic-billing-header: cch=1; mean?"
    counted = await client.post(f"{PATH}/count_tokens", json={"messages": [USER], "system": system})
    prompt = await engine.tokenize([{"role": "system", "content": system}, USER])
    assert counted.json() == {"input_tokens": len(prompt)}
    alone = {"messages": [USER], "system": [{"type": "text", "text": BILLING.format("1")}]}
    counted = await client.post(f"{PATH}/count_tokens", json=alone)
    assert counted.json() == {"input_tokens": len(await engine.tokenize([USER]))}


async def test_what_agents_send_is_taken(demo: httpx.AsyncClient) -> None:
    message = await ask(
        demo,
        system=[{"type": "text", "text": "Agent.", "cache_control": {"type": "ephemeral"}}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "x"},
        tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        service_tier="auto",
    )
    assert message.content


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
         "messages[0].content[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{}] * 1000}] * 5}, "4096 parts in all"),
        ({"messages": [{"role": "user", "content": [{"content": [{}] * 1100}] * 4}]}, "4096 parts"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
    ],
)  # fmt: skip
async def test_bad_requests(client: httpx.AsyncClient, fields: dict[str, Any], named: str) -> None:
    body = {"messages": [USER], "max_tokens": 5, **fields}
    for streams in (False, True):
        answer = await client.post(PATH, json={**body, "stream": streams})
        assert answer.status_code == 400, answer.text
        refusal = answer.json()
        assert set(refusal) == {"type", "error", "request_id"}
        assert refusal["type"] == "error"
        assert refusal["error"]["type"] == "invalid_request_error"
        assert named in refusal["error"]["message"]


FIELDS = [
    ({"max_tokens", "top_k", "seed", "priority"}, (*WRONG_NUMBERS, "1.5", HUGE, ENDLESS)),
    ({"temperature", "top_p", "timeout"}, (*WRONG_NUMBERS, f"-{HUGE}", TOO_LARGE_FLOAT)),
    ({"stream", "ignore_eos"}, WRONG_TRUTHS),
    ({"messages", "stop_sequences", "tools", "system"}, WRONG_LISTS),
    ({"model", "cache_salt"}, WRONG_TEXTS),
    ({"tool_choice", "thinking", "output_config", "chat_template_kwargs"}, ("1", "[]", '"x"')),
]


@pytest.mark.parametrize(
    ("field", "values"), [(field, values) for fields, values in FIELDS for field in sorted(fields)]
)
async def test_values_of_the_wrong_kind(
    client: httpx.AsyncClient, field: str, values: tuple[str, ...]
) -> None:
    good = {"messages": [USER], "max_tokens": 5}
    rest = json.dumps({name: given for name, given in good.items() if name != field})[:-1]
    for value in values:
        body = f'{rest}, "{field}": {value}}}'.encode()
        answer = await client.post(PATH, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (value[:50], answer.text)
        refusal = answer.json()["error"]
        assert refusal["type"] == "invalid_request_error"
        # A number beyond all numbers is no JSON, and no field's fault.
        assert field in refusal["message"] or value in (TOO_LARGE_FLOAT, ENDLESS), refusal
        assert len(refusal["message"]) < 500


async def test_every_error_has_anthropics_shape(client: httpx.AsyncClient) -> None:
    cases = [
        (await client.post(PATH, json={"messages": [USER], "max_tokens": 1, "model": "other"}),
         404, "not_found_error"),
        (await client.get(PATH), 405, "invalid_request_error"),
        (await client.post(PATH, content=b" " * 100_001), 413, "request_too_large"),
        (await client.post(PATH, content=b"x", headers={"content-type": "text/plain"}),
         415, "invalid_request_error"),
        (await client.post(PATH, content=b"{", headers={"content-type": "application/json"}),
         400, "invalid_request_error"),
    ]  # fmt: skip
    for answer, status, kind in cases:
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == kind
        assert answer.json()["request_id"] == answer.headers["x-request-id"]


async def test_the_official_client_reads_it(demo_app: Starlette) -> None:
    library = anthropic.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]
    # The client's version decides who speaks HTTP for it.
    speaker = importlib.import_module(library)
    http = speaker.AsyncClient(transport=speaker.ASGITransport(demo_app), timeout=60)
    async with anthropic.AsyncAnthropic(
        base_url="http://slipstream", api_key="none", http_client=http, max_retries=0
    ) as official:
        fields: Any = {"model": "demo", "max_tokens": 60, "messages": [ASKS_WEATHER]}
        # Newer versions do not know the field.
        fields["extra_body"] = {"temperature": 0}
        whole = await official.messages.create(**fields, tools=[WEATHER])
        async with official.messages.stream(**fields, tools=[WEATHER]) as events:
            joined = await events.get_final_message()
        uses = [[b for b in m.content if b.type == "tool_use"] for m in (whole, joined)]
        assert uses[0][0].input == uses[1][0].input == {"city": "Paris"}
        counted = await official.messages.count_tokens(model="demo", messages=[ASKS_WEATHER])
        assert counted.input_tokens > 5
        with pytest.raises(anthropic.NotFoundError):
            await official.messages.create(**{**fields, "model": "other"})
