"""Histories as clients and agents send them back.

The reports are listed by kind in docs/clients.md, "Tried from public reports".
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.http.asking import ASKS_WEATHER, CHAT, CITY, MESSAGES, RESPONSES, WEATHER, post, refused

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


# Histories


@pytest.mark.parametrize("arguments", ["{", '{"a": "He said "hi""}', "", "null", "[1]", None, {}])
async def test_a_call_in_the_history_does_not_end_a_conversation(
    demo_client: httpx.AsyncClient, arguments: Any
) -> None:
    call = {"name": "get_weather", "arguments": arguments}
    history = [
        *ASKS_WEATHER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
    ]
    answer = await post(demo_client, CHAT, messages=history, tools=[WEATHER], max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


async def test_arguments_that_are_null_are_none(demo_client: httpx.AsyncClient) -> None:
    async def prompt(**function: Any) -> list[int]:
        calls = [{"id": "c1", "type": "function", "function": {"name": "now", **function}}]
        messages = [*ASKS_WEATHER, {"role": "assistant", "content": None, "tool_calls": calls}]
        found: list[int] = (await post(demo_client, "/tokenize", messages=messages))["tokens"]
        return found

    assert await prompt(arguments=None) == await prompt(arguments="") == await prompt()


async def test_results_of_tools_come_right_behind_the_calls(demo_client: httpx.AsyncClient) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "12 degrees"}
    text = {"type": "text", "text": "Say it in French."}

    async def ask(*blocks: Any) -> Any:
        answer = await post(
            demo_client,
            MESSAGES,
            messages=[
                *ASKS_WEATHER,
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": blocks},
            ],
            tools=[
                {"name": "get_weather", "description": "Get the weather.", "input_schema": CITY}
            ],
            temperature=0,
            max_tokens=12,
        )
        usage = answer["usage"]
        tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        return answer["content"], tokens

    # As a chat orders them. Templates stop looking where somebody else has spoken.
    history = [
        *ASKS_WEATHER,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "t1", "function": {"name": "get_weather", "arguments": use["input"]}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "12 degrees"},
        {"role": "user", "content": "Say it in French."},
    ]
    answer = await post(
        demo_client, CHAT, messages=history, tools=[WEATHER], temperature=0, max_tokens=12
    )
    expected = answer["choices"][0]["message"]["content"]
    for blocks in ((result, text), (text, result)):
        content, tokens = await ask(*blocks)
        assert content[0]["text"] == expected
        assert tokens == answer["usage"]["prompt_tokens"]


async def test_tools_that_come_among_the_items_are_tools(demo_client: httpx.AsyncClient) -> None:
    inner = {"type": "function", "name": "get_weather", "parameters": CITY}
    item = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [
            {
                "type": "namespace",
                "name": "functions",
                "tools": [inner, {"type": "custom", "name": "exec"}],
            }
        ],
    }
    user = {"role": "user", "content": "What is the weather in Paris?"}
    asked = {"temperature": 0, "max_output_tokens": 60, "tool_choice": "required"}
    answer = await post(demo_client, RESPONSES, input=[item, user], **asked)
    (call,) = answer["output"]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert json.loads(call["arguments"])["city"]
    given = await post(demo_client, RESPONSES, input=[user], tools=item["tools"], **asked)
    assert answer["usage"]["input_tokens"] == given["usage"]["input_tokens"]
    kept = await demo_client.get(f"{RESPONSES}/{answer['id']}/input_items", params={"order": "asc"})
    shown = kept.json()["data"][0]
    assert shown == {**item, "id": shown["id"]}
    assert shown["id"].startswith("at_")
    # Of one name the request's own is meant; a next turn has those of its own request alone.
    own = {"type": "function", "name": "get_weather", "parameters": {"properties": {}}}
    answer = await post(demo_client, RESPONSES, input=[item, user], tools=[own], **asked)
    assert answer["output"][0]["arguments"] == "{}"
    for wrong in ({**item, "tools": None}, {"type": "additional_tools"}):
        error = await refused(demo_client, RESPONSES, input=[wrong, user])
        assert error["param"] == "input[0].tools"


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "abc"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": '{"value": '},
    ],
    ids=["untyped", "parts", "encrypted", "summary", "answer", "cut short"],
)
async def test_items_as_agents_send_them_are_taken(
    demo_client: httpx.AsyncClient, item: dict[str, Any]
) -> None:
    asked = [item, {"role": "user", "content": "Go on"}]
    await post(demo_client, RESPONSES, input=asked, max_output_tokens=16)
