"""Syntaxes of calls end to end: a template shows one, a grammar forces it, and clients get it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest

from src.core.config import ChatSection, Config, ModelSection
from src.http import create_app
from src.text.tool_calls.syntaxes import SYNTAXES
from tests.http.asking import client_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

DEMO = Path(__file__).parents[3] / "configs" / "demo"
PARAMETERS = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "deep": {"type": "boolean"},
    },
    "required": ["count", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture(scope="module")
async def client(config: Config, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    demo = msgspec.structs.replace(
        config,
        model=ModelSection(path=str(DEMO), served_model_name=("demo",)),
        chat=ChatSection(request_templates="all"),
    )
    app = create_app(demo, owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server.ready_engine()
        async with client_of(app) as client:
            yield client


async def ask(client: httpx.AsyncClient, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Look."}], **fields}
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def joined(client: httpx.AsyncClient, **fields: Any) -> tuple[str, list[dict[str, Any]], str]:
    """What a client makes of a stream: content, calls, and why it ended."""
    content, reason = "", ""
    calls: list[dict[str, Any]] = []
    body = {"model": "demo", "messages": [{"role": "user", "content": "Look."}], **fields}
    answer = await client.post("/v1/chat/completions", json={**body, "stream": True})
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        content += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for piece in choice["delta"].get("tool_calls") or ():
            if piece["index"] == len(calls):
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            calls[piece["index"]]["arguments"] += piece["function"].get("arguments") or ""
    return content, calls, reason


def template(syntax: str) -> str:
    """A template that shows a syntax, and nothing else of the model's."""
    marks = SYNTAXES[syntax].shown_by
    shown = marks[0] if marks else ""
    return "{# " + (shown if isinstance(shown, str) else " ".join(shown)) + " #}{{ messages }}"


# The demo's answers end with a tag that parts the messages of gpt-oss.
@pytest.mark.parametrize("syntax", [syntax for syntax in SYNTAXES if syntax != "openai"])
async def test_a_required_call_is_valid_in_every_syntax(
    client: httpx.AsyncClient, syntax: str
) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "chat_template": template(syntax)}
    fields |= {"temperature": 1.5, "seed": 7, "max_tokens": 400, "parallel_tool_calls": False}
    (choice,) = (await ask(client, **fields))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"].get("content")
    (call,) = choice["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
    called = {key: call["function"][key] for key in ("name", "arguments")}
    assert await joined(client, **fields) == ("", [called], "tool_calls")


@pytest.mark.parametrize("syntax", ["hermes", "json", "qwen3_coder", "deepseek_v3"])
async def test_a_forced_call_that_is_cut_short_has_no_content(
    client: httpx.AsyncClient, syntax: str
) -> None:
    shown = template(syntax)
    for most in (1, 3, 5, 8, 12, 16):
        fields = {"tools": TOOLS, "tool_choice": "required", "chat_template": shown}
        fields |= {"temperature": 0, "max_tokens": most}
        (choice,) = (await ask(client, **fields))["choices"]
        assert choice["finish_reason"] == "length"
        assert not choice["message"].get("content")
        content, _, reason = await joined(client, **fields)
        assert (content, reason) == ("", "length")


async def test_nor_has_it_in_the_other_protocols(client: httpx.AsyncClient) -> None:
    for most in (1, 4, 8):
        tool = {"name": "look", "input_schema": PARAMETERS}
        choice = {"type": "any"}
        message = await ask(
            client, "/v1/messages", tools=[tool], tool_choice=choice, max_tokens=most
        )
        assert message["stop_reason"] == "max_tokens"
        assert not [block for block in message["content"] if block.get("text")]
        fields = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
        answer = await client.post(
            "/v1/responses",
            json={"model": "demo", "input": "Look.", "max_output_tokens": most, **fields},
        )
        assert answer.status_code == 200, answer.text
        texts = [
            part["text"]
            for item in answer.json()["output"]
            for part in item.get("content") or ()
            if part["type"] == "output_text"
        ]
        assert not "".join(texts)
