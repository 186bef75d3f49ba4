"""Definitions of tools as clients send them.

The reports are listed by kind in docs/clients.md, "Tried from public reports".
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.http.asking import ASKS_WEATHER, CHAT, post

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


# Tools


@pytest.mark.parametrize(
    "function",
    [
        {"name": "now"},
        {"name": "now", "parameters": None, "description": None, "strict": None},
        {"name": "now", "parameters": {}},
        {"name": "mcp__srv-1__get.now", "parameters": {"type": "object", "properties": {}}},
    ],
    ids=["bare", "nulls", "empty", "dotted"],
)
async def test_a_function_without_parameters_is_called_without_arguments(
    demo_client: httpx.AsyncClient, function: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": function}]
    answer = await post(
        demo_client,
        CHAT,
        messages=ASKS_WEATHER,
        tools=tools,
        tool_choice="required",
        temperature=0,
        max_tokens=60,
    )
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": function["name"], "arguments": "{}"}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


async def test_definitions_of_several_tools_do_not_meet(demo_client: httpx.AsyncClient) -> None:
    def tool(name: str, words: list[str]) -> dict[str, Any]:
        word = {"type": "object", "properties": {"n": {"enum": words}}, "required": ["n"]}
        parameters = {
            "type": "object",
            "properties": {"word": {"$ref": "#/$defs/Word"}},
            "required": ["word"],
            "additionalProperties": False,
            "$defs": {"Word": {**word, "additionalProperties": False}},
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [tool("first", ["Mün"]), tool("second", ["京"])]
    for name, word in (("first", "Mün"), ("second", "京")):
        answer = await post(
            demo_client,
            CHAT,
            messages=ASKS_WEATHER,
            tools=tools,
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": name}}],
                },
            },
            max_tokens=100,
            seed=3,
        )
        call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
        assert call["name"] == name
        # As the model spelt it, and not escaped.
        assert word in call["arguments"]
        assert json.loads(call["arguments"]) == {"word": {"n": word}}
