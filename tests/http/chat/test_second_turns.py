"""What the server answered comes back as history, in each protocol, through templates of each kind.

The prompts are those that the demo model is given; its first answer is forced to be a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from src.text.chat_template import ChatTemplate
from tests.http.asking import client_of
from tests.text.chat_templates import (
    BY_KIND,
    DEEPSEEK_DISTILL,
    LLAMA3,
    MISTRAL_IDS,
    QWEN3,
    QWEN3_FIRST,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

TEMPLATES = {
    "qwen3, the first": QWEN3_FIRST,
    # A model that is no reasoner has thought already.
    "deepseek's distills": DEEPSEEK_DISTILL.replace("<think>\\n'", "<think>\\n</think>'"),
    "mistral with ids": MISTRAL_IDS,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "adds to content and arguments": BY_KIND["adds to content and arguments"],
}
QUESTION = "What is the weather in Paris?"
RESULT = "17 degrees"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}
# An id as another provider makes them, and text beside the call.
FOREIGN = "toolu_01A09q90qw90lq917835lq9"
SAID = "Let me look."


@pytest.fixture
async def demo(demo_app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(demo_app) as client:
        yield client


@pytest.fixture
def prompts(demo_app: Starlette, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts of conversations that templates made, and not those that try a template out."""
    made: list[str] = []
    render = ChatTemplate._render

    def recorded(self: ChatTemplate, *arguments: Any) -> str:
        text = render(self, *arguments)
        if QUESTION in text:
            made.append(text)
        return text

    monkeypatch.setattr(ChatTemplate, "_render", recorded)
    return made


@pytest.fixture(params=TEMPLATES)
async def template(
    request: pytest.FixtureRequest, demo_app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> str:
    tokenizer = (await demo_app.state.server.ready_engine()).tokenizer
    special = {"bos_token": "", "eos_token": "<|end|>"}
    chosen = ChatTemplate(TEMPLATES[request.param], special_tokens=special)
    monkeypatch.setattr(tokenizer, "_chat_template", chosen)
    name: str = request.param
    return name


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json={"model": "demo", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def check(prompt: str, arguments: Any, *, said: bool = False, template: str = "") -> None:
    """The prompt shows the call once, so that its arguments are read again, and what it came to."""
    shown = prompt[prompt.index(QUESTION) :]
    assert len(re.findall("get_weather", shown)) == 1, prompt
    begin = shown.rindex("{", 0, shown.index('"city"'))
    assert json.JSONDecoder().raw_decode(shown[begin:])[0] == arguments
    assert shown.count(RESULT) == 1
    assert "None" not in shown
    # Others show nothing else of a turn that has calls.
    if said and template not in ("mistral with ids", "llama3"):
        assert shown.count(SAID) == 1


async def test_chat_completions(demo: httpx.AsyncClient, prompts: list[str], template: str) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", "function": FUNCTION}]
    path, fields = "/v1/chat/completions", {"tools": tools, "max_tokens": 200}
    first = await post(demo, path, messages=messages, tool_choice="required", **fields)
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"][:1]
    message = message | {"tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
    await post(demo, path, messages=[*messages, message, result], **fields)
    arguments = json.loads(call["function"]["arguments"])
    check(prompts[-1], arguments)
    # The same call with text beside it, made by another server.
    foreign = {"role": "assistant", "content": SAID, "tool_calls": [call | {"id": FOREIGN}]}
    result = {"role": "tool", "tool_call_id": FOREIGN, "content": RESULT}
    await post(demo, path, messages=[*messages, foreign, result], **fields)
    check(prompts[-1], arguments, said=True, template=template)


async def test_responses(demo: httpx.AsyncClient, prompts: list[str], template: str) -> None:
    given: list[Any] = [{"role": "user", "content": QUESTION}]
    path = "/v1/responses"
    fields = {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 200}
    first = await post(demo, path, input=given, tool_choice="required", **fields)
    call = next(item for item in first["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    output = [item for item in first["output"] if item["type"] != "function_call"]
    await post(demo, path, input=[*given, *output, call, result], **fields)
    arguments = json.loads(call["arguments"])
    check(prompts[-1], arguments)
    if len(output) + 1 == len(first["output"]):
        await post(demo, path, input=[result], previous_response_id=first["id"], **fields)
        check(prompts[-1], arguments)
    said = {"type": "message", "role": "assistant", "content": SAID}
    result = result | {"call_id": FOREIGN}
    await post(demo, path, input=[*given, said, call | {"call_id": FOREIGN}, result], **fields)
    check(prompts[-1], arguments, said=True, template=template)


async def test_messages(demo: httpx.AsyncClient, prompts: list[str], template: str) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tool = {"name": FUNCTION["name"], "input_schema": SCHEMA}
    path, fields = "/v1/messages", {"tools": [tool], "max_tokens": 200}
    first = await post(demo, path, messages=messages, tool_choice={"type": "any"}, **fields)
    call = next(block for block in first["content"] if block["type"] == "tool_use")
    content = [block for block in first["content"] if block["type"] != "tool_use"] + [call]

    async def again(content: list[Any], call_id: str) -> str:
        result = {"type": "tool_result", "tool_use_id": call_id, "content": RESULT}
        turns = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        await post(demo, path, messages=[*messages, *turns], **fields)
        return prompts[-1]

    check(await again(content, call["id"]), call["input"])
    foreign = [{"type": "text", "text": SAID}, call | {"id": FOREIGN}]
    check(await again(foreign, FOREIGN), call["input"], said=True, template=template)
