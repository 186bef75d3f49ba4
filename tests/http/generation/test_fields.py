"""Fields whose edges clients and their libraries rely on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from src.cli.bench.result_options import write_json
from src.http.server.line_breaks import unbroken
from tests.http.strict import events_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hello"}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 1},
    CHAT: {"messages": [USER], "max_tokens": 1},
    RESPONSES: {"input": "hello", "max_output_tokens": 1},
    MESSAGES: {"messages": [USER], "max_tokens": 1},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
ITEM = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}


async def refusal(client: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    answer = await client.post(path, json={**GOOD[path], **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize("path", list(GOOD))
async def test_a_salt_is_not_empty(client: httpx.AsyncClient, path: str) -> None:
    assert "cache_salt" in (await refusal(client, path, cache_salt=""))["message"]
    assert (await client.post(path, json={**GOOD[path], "cache_salt": "x"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "where"),
    [
        *(
            (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}, where)
            for call, where in (
                ({**CALL, "id": ""}, "messages.tool_calls.id"),
                ({**CALL, "function": {"name": ""}}, "messages.tool_calls.function.name"),
            )
        ),
        (
            CHAT,
            {"messages": [USER, {"role": "tool", "content": "1", "tool_call_id": ""}]},
            "messages.tool_call_id",
        ),
        (CHAT, {"tools": [{"function": {"name": ""}}]}, "tools.function.name"),
        (RESPONSES, {"input": [{**ITEM, "call_id": ""}]}, "input[0].call_id"),
        (RESPONSES, {"input": [{**ITEM, "name": ""}]}, "input[0].name"),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "call_id": "", "output": "1"}]},
            "input[0].call_id",
        ),
        (RESPONSES, {"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        (
            RESPONSES,
            {"tools": [{"type": "namespace", "name": "", "tools": []}]},
            "tools[0].name",
        ),
        *(
            (
                MESSAGES,
                {"messages": [USER, {"role": "assistant", "content": [{**USE, name: ""}]}, USER]},
                f"messages[1].content[0].{name}",
            )
            for name in ("id", "name")
        ),
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": ""}]}
                ]
            },
            "messages[0].content[0].tool_use_id",
        ),
        (MESSAGES, {"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
    ],
)
async def test_what_names_a_call_is_not_empty(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], where: str
) -> None:
    message = (await refusal(client, path, **fields))["message"]
    # Where lists are decoded at once, it is not known which of their entries it is.
    assert where.rpartition(".")[2] in message
    assert "length >= 1" in message


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_choice_of_tools_needs_tools(client: httpx.AsyncClient, path: str) -> None:
    spelt: dict[str, Any] = {"auto": "auto", "required": "required", "none": "none"}
    if path == MESSAGES:
        spelt = {"auto": {"type": "auto"}, "required": {"type": "any"}, "none": {"type": "none"}}
    for kind in ("auto", "required"):
        for tools in ({}, {"tools": []}):
            error = await refusal(client, path, tool_choice=spelt[kind], **tools)
            assert "tool_choice may only be given with tools" in error["message"]
    # This asks for nothing.
    answer = await client.post(path, json={**GOOD[path], "tool_choice": spelt["none"]})
    assert answer.status_code == 200


async def test_a_response_may_say_what_is_so_without_tools(client: httpx.AsyncClient) -> None:
    for choice in ("auto", "none"):
        body = {**GOOD[RESPONSES], "tools": [], "tool_choice": choice}
        assert (await client.post(RESPONSES, json=body)).status_code == 200
    error = await refusal(client, RESPONSES, tools=[], tool_choice="required")
    assert error["param"] == "tool_choice"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ({"5": 1, "7": 101}, "logit_bias[7]"),
        ({"5": 1, "abc": 1}, "logit_bias['abc']"),
        ({"5": 1, "7": "x"}, "logit_bias['7']"),
        ({"5": 1, "7": None}, "logit_bias['7']"),
        ({"5": 1, "1.5": 1}, "logit_bias['1.5']"),
        ({"5": 1, "-3": 1}, "-3"),
        ({"5": 1, "7": 10**400}, "logit_bias[7]"),
    ],
)
async def test_an_error_of_a_bias_names_its_key(
    client: httpx.AsyncClient, path: str, bias: dict[str, Any], named: str
) -> None:
    error = await refusal(client, path, logit_bias=bias)
    assert error["param"] == "logit_bias"
    assert named in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_usage_comes_with_every_event_only_where_there_is_usage(
    client: httpx.AsyncClient, path: str
) -> None:
    async def usages(**options: bool) -> list[Any]:
        body = {**GOOD[path], "max_tokens": 3, "stream": True, "stream_options": options}
        text = (await client.post(path, json=body)).text
        events = [json.loads(data) for _, data in events_of(text) if data != "[DONE]"]
        return [event.get("usage") for event in events]

    assert all(await usages(include_usage=True, continuous_usage_stats=True))
    assert not any(await usages(continuous_usage_stats=True))
    assert not any(await usages(include_usage=False, continuous_usage_stats=True))
    *before, last = await usages(include_usage=True)
    assert last
    assert not any(before)


IDS = list(range(40, 60))


async def rendered(client: httpx.AsyncClient, path: str, **fields: Any) -> list[int]:
    answer = await client.post(f"{path}/render", json={**GOOD[path], **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    token_ids: list[int] = (body[0] if isinstance(body, list) else body)["token_ids"]
    return token_ids


async def test_a_prompt_is_cut_on_the_side_that_is_asked_for(client: httpx.AsyncClient) -> None:
    for side, kept in ((None, IDS[-5:]), ("left", IDS[-5:]), ("right", IDS[:5])):
        fields: dict[str, Any] = {"truncate_prompt_tokens": 5}
        if side is not None:
            fields["truncation_side"] = side
        assert await rendered(client, COMPLETIONS, prompt=IDS, **fields) == kept
    for path, asked in ((COMPLETIONS, {"prompt": "one two three four five six"}), (CHAT, {})):
        whole = await rendered(client, path, **asked)
        cut = {"truncate_prompt_tokens": 3, **asked}
        assert await rendered(client, path, **cut, truncation_side="right") == whole[:3]
        assert await rendered(client, path, **cut, truncation_side="left") == whole[-3:]


async def test_a_long_text_is_cut_on_either_side(client: httpx.AsyncClient) -> None:
    text = "begin " + "word " * 8000 + "end"
    for side in ("left", "right"):
        fields = {"prompt": text, "truncate_prompt_tokens": 8, "truncation_side": side}
        kept = await rendered(client, COMPLETIONS, **fields)
        short = "begin word word" if side == "right" else "word word end"
        few = await rendered(client, COMPLETIONS, prompt=short)
        assert len(kept) == 8
        assert (kept[:2] == few[:2]) if side == "right" else (kept[-2:] == few[-2:])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_side_without_a_number_is_refused(client: httpx.AsyncClient, path: str) -> None:
    assert (await refusal(client, path, truncation_side="left"))["param"] == "truncation_side"
    error = await refusal(client, path, truncation_side="top", truncate_prompt_tokens=5)
    assert error["param"] == "truncation_side"


# What Python's str.splitlines takes for the end of a line, and JSON leaves as it is.
BREAKS = "a\u2028b\u2029c\x85d"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": BREAKS, "echo": True}),
        (
            CHAT,
            {
                "messages": [USER, {"role": "assistant", "content": BREAKS}],
                "continue_final_message": True,
                "echo": True,
            },
        ),
        (RESPONSES, {"instructions": BREAKS}),
    ],
)
async def test_no_event_has_a_line_break_of_unicode(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    answer = await client.post(path, json={**GOOD[path], **fields, "stream": True})
    assert answer.status_code == 200
    lines = answer.text.splitlines()
    assert lines == answer.text.split("\n")[:-1]
    events = [json.loads(data) for _, data in events_of(answer.text) if data != "[DONE]"]
    assert BREAKS in json.dumps(events, ensure_ascii=False)


async def test_a_client_that_splits_lines_reads_them(
    app: Starlette, client: httpx.AsyncClient
) -> None:
    transport = httpx.ASGITransport(app)
    async with openai.AsyncOpenAI(
        base_url="http://slipstream/v1",
        api_key="x",
        http_client=httpx.AsyncClient(transport=transport),
    ) as asking:
        stream = await asking.completions.create(
            model="tiny", prompt=BREAKS, max_tokens=1, stream=True, extra_body={"echo": True}
        )
        text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    assert text.startswith(BREAKS)


def test_only_line_breaks_are_escaped() -> None:
    for text in ("", "plain", "\u2027 \u202a \u0084 \u0086 \u2014 \u20ac", "\\u2028"):
        assert unbroken(text.encode()) == text.encode()
    assert json.loads(unbroken(json.dumps(BREAKS, ensure_ascii=False).encode())) == BREAKS


def test_files_of_results_are_json(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_json(file, {"mean": math.nan, "most": math.inf, "n": 3, "text": "\u2028"})
    text = file.read_text()

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    assert json.loads(text, parse_constant=refuse) == {
        "mean": None,
        "most": None,
        "n": 3,
        "text": "\u2028",
    }
    assert text.endswith("\n")
