"""Tools end to end: the bundled model, which was trained to call them, and the official client."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from starlette.applications import Starlette

from src.core.config import Config, ModelSection, StructuredOutputSection
from src.http import create_app
from src.http.chat import handlers as chat
from src.text.answer_plan import AnswerPlan, plan_answer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

DEMO = Path(__file__).parents[3] / "configs" / "demo"


def function(name: str, description: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


WEATHER = function("get_weather", "Get the weather in a city.", city="string")
ADD = function("add", "Add two numbers.", a="integer", b="integer")
TOOLS = [WEATHER, ADD]
ASKS_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
ASKS_SUM = [{"role": "user", "content": "Use the tool to add 123 and 456."}]
ASKS_NOTHING = [{"role": "user", "content": "What is 5 + 29?"}]


@pytest.fixture(scope="module")
async def client(config: Config, anyio_backend: str) -> AsyncIterator[openai.AsyncOpenAI]:
    demo = msgspec.structs.replace(
        config, model=ModelSection(path=str(DEMO), served_model_name=("demo",))
    )
    app = create_app(demo, owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server.ready_engine()
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), timeout=60)
        async with openai.AsyncOpenAI(
            base_url="http://slipstream/v1", api_key="none", http_client=http, max_retries=0
        ) as client:
            yield client


async def ask(client: openai.AsyncOpenAI, messages: Any, **fields: Any) -> ChatCompletion:
    fields = {"temperature": 0, "max_tokens": 80, **fields}
    answer: ChatCompletion = await client.chat.completions.create(
        model="demo", messages=messages, **fields
    )
    # The client reads leniently; its types are strict about what the API defines.
    ChatCompletion.model_validate(answer.model_dump(), strict=False)
    return answer


class Streamed:
    """What a client joins from a stream."""

    def __init__(self) -> None:
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.chunks: list[ChatCompletionChunk] = []

    def add(self, chunk: ChatCompletionChunk) -> None:
        self.chunks.append(chunk)
        (choice,) = chunk.choices
        self.content += choice.delta.content or ""
        self.finish_reason = choice.finish_reason or self.finish_reason
        for piece in choice.delta.tool_calls or ():
            assert piece.function is not None
            if piece.index == len(self.calls):
                assert piece.id is not None
                assert piece.type == "function"
                self.calls.append({"name": piece.function.name, "arguments": ""})
            self.calls[piece.index]["arguments"] += piece.function.arguments or ""


async def ask_streamed(client: openai.AsyncOpenAI, messages: Any, **fields: Any) -> Streamed:
    fields = {"temperature": 0, "max_tokens": 80, **fields}
    streamed = Streamed()
    async with await client.chat.completions.create(
        model="demo", messages=messages, stream=True, **fields
    ) as stream:
        async for chunk in stream:
            streamed.add(chunk)
    return streamed


def calls_of(message: ChatCompletionMessage) -> list[dict[str, Any]]:
    return [
        {"name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls or ()
        if call.type == "function"
    ]


async def both(
    client: openai.AsyncOpenAI, messages: Any, **fields: Any
) -> tuple[ChatCompletionMessage, Streamed]:
    """The answer, whole and streamed, which are the same."""
    (choice,) = (await ask(client, messages, **fields)).choices
    streamed = await ask_streamed(client, messages, **fields)
    assert streamed.content == (choice.message.content or "")
    assert streamed.calls == calls_of(choice.message)
    assert streamed.finish_reason == choice.finish_reason
    assert (choice.finish_reason == "tool_calls") == bool(streamed.calls)
    return choice.message, streamed


@pytest.mark.parametrize("choice", [openai.omit, "auto"])
async def test_the_model_calls_a_tool_when_it_is_asked_to(
    client: openai.AsyncOpenAI, choice: Any
) -> None:
    message, _ = await both(client, ASKS_WEATHER, tools=TOOLS, tool_choice=choice)
    (call,) = calls_of(message)
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"})
    assert message.content is None
    assert message.tool_calls is not None
    assert message.tool_calls[0].id.startswith("call_")


async def test_the_model_says_what_the_tool_gave_back(client: openai.AsyncOpenAI) -> None:
    first, _ = await both(client, ASKS_SUM, tools=[ADD])
    assert first.tool_calls is not None
    (call,) = calls_of(first)
    total = sum(json.loads(call["arguments"]).values())
    assert total == 579
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": str(total)}
    # As clients do it: the message goes back as it came, its null fields included.
    messages = [*ASKS_SUM, first.model_dump(), result]
    last, _ = await both(client, messages, tools=[ADD])
    assert last.content == "The result is 579."


async def test_none_takes_what_the_model_writes_for_text(client: openai.AsyncOpenAI) -> None:
    message, _ = await both(client, ASKS_WEATHER, tools=TOOLS, tool_choice="none")
    assert message.content
    assert message.tool_calls is None


async def test_an_answer_without_a_call_is_text(client: openai.AsyncOpenAI) -> None:
    message, _ = await both(client, ASKS_NOTHING)
    assert message.content == "5 + 29 = 34."
    assert message.tool_calls is None


async def test_a_call_is_made_where_it_is_required(client: openai.AsyncOpenAI) -> None:
    message, streamed = await both(client, ASKS_SUM, tools=TOOLS, tool_choice="required")
    (call,) = calls_of(message)
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 123, "b": 456})
    # Its arguments come as they are written, since they cannot turn out to be malformed.
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in streamed.chunks) > 2


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_even_of_a_model_that_would_rather_talk(
    client: openai.AsyncOpenAI, temperature: float
) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 300, "seed": 3}
    message, _ = await both(client, ASKS_NOTHING, **fields, temperature=temperature)
    for call in calls_of(message):
        check_arguments(call)


def check_arguments(call: dict[str, Any]) -> None:
    schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    properties = schema[call["name"]]["properties"]
    arguments = json.loads(call["arguments"])
    assert set(arguments) == set(properties)
    kinds = {"string": str, "integer": int}
    for key, value in arguments.items():
        assert type(value) is kinds[properties[key]["type"]]


async def test_strict_functions_leave_the_choice_to_the_model(client: openai.AsyncOpenAI) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    message, streamed = await both(client, ASKS_SUM, tools=strict)
    (call,) = calls_of(message)
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 123, "b": 456})
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in streamed.chunks) > 2
    said, _ = await both(client, [{"role": "user", "content": "Hello!"}], tools=strict)
    free, _ = await both(client, [{"role": "user", "content": "Hello!"}], tools=TOOLS)
    assert (said.content, said.tool_calls) == (free.content, free.tool_calls)


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_schemas_are_weighed_before_a_grammar_spells_them(
    demo_app: Starlette, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    engine = await demo_app.state.server.ready_engine()
    section = StructuredOutputSection(max_bytes=2000)
    monkeypatch.setattr(
        engine, "config", msgspec.structs.replace(engine.config, structured_output=section)
    )
    threads = []

    def plan(*arguments: Any, **options: Any) -> AnswerPlan:
        threads.append(threading.current_thread())
        return plan_answer(*arguments, **options)

    monkeypatch.setattr(chat, "plan_answer", plan)
    large = function("large", "", **{f"property_{index}": "string" for index in range(60)})
    large["function"]["strict"] = True
    body = {"messages": ASKS_NOTHING, "max_tokens": 1, "tool_choice": choice}
    transport = httpx.ASGITransport(demo_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:

        async def ask(*tools: dict[str, Any]) -> httpx.Response:
            return await client.post("/v1/chat/completions", json={**body, "tools": list(tools)})

        error = (await ask(WEATHER, large)).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "invalid_grammar")
        assert error["message"].startswith("tools: may have at most 2000 bytes, got ")
        assert (await ask(WEATHER, ADD)).status_code == 200
        large["function"]["strict"] = False
        assert (await ask(large)).status_code == (200 if choice == "auto" else 400)
    # And off the event loop where there is a grammar.
    aside = [thread is not threading.main_thread() for thread in threads]
    assert aside == ([True, False, False] if choice == "auto" else [True] * 3)


@pytest.mark.parametrize("strict", [False, True])
async def test_one_schema_that_cannot_be_enforced_keeps_no_other_from_being_called(
    client: openai.AsyncOpenAI, *, strict: bool
) -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    parameters = {"type": "object", "properties": {"tags": tags}, "required": ["tags"]}
    loose = {"name": "label", "parameters": parameters, "strict": strict}
    asked = client.chat.completions.create(
        model="demo",
        messages=ASKS_SUM,  # type: ignore[arg-type]
        tools=[*TOOLS, {"type": "function", "function": loose}],  # type: ignore[list-item]
        tool_choice="required",
        temperature=0,
    )
    if strict:
        with pytest.raises(openai.BadRequestError, match=r"/properties/tags/uniqueItems") as raised:
            await asked
        assert raised.value.param == "tools"
        return
    (call,) = (await asked).choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "add",
        {"a": 123, "b": 456},
    )


async def test_a_named_function_is_called_whatever_is_asked(client: openai.AsyncOpenAI) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    strict = [WEATHER, {**ADD, "function": {**ADD["function"], "strict": True}}]
    message, _ = await both(client, ASKS_WEATHER, tools=strict, tool_choice=named, max_tokens=200)
    (call,) = calls_of(message)
    assert call["name"] == "add"
    check_arguments(call)


async def test_one_of_the_allowed_tools_is_called(client: openai.AsyncOpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    message, _ = await both(
        client,
        ASKS_WEATHER,
        tools=TOOLS,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        parallel_tool_calls=False,
        max_tokens=200,
    )
    (call,) = calls_of(message)
    assert call["name"] == "add"


ORDER = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", 'b"{', None]},
        "numbers": {"type": "array", "items": {"$ref": "#/$defs/small"}, "maxItems": 3},
        "inner": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 5}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "numbers", "inner"],
    "$defs": {"small": {"type": "integer", "minimum": -9, "maximum": 9}},
}


async def test_forced_arguments_are_valid_at_any_temperature(client: openai.AsyncOpenAI) -> None:
    tool = {"type": "function", "function": {"name": "order", "parameters": ORDER}}
    answer = await ask(
        client,
        ASKS_NOTHING,
        tools=[tool, WEATHER],
        tool_choice={"type": "function", "function": {"name": "order"}},
        temperature=2,
        n=16,
        seed=1,
        max_tokens=200,
    )
    for choice in answer.choices:
        (call,) = calls_of(choice.message)
        assert choice.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call["arguments"]), ORDER)


async def test_a_forced_call_that_is_cut_short_says_so(client: openai.AsyncOpenAI) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 15}
    (choice,) = (await ask(client, ASKS_WEATHER, **fields)).choices
    assert choice.finish_reason == "length"
    streamed = await ask_streamed(client, ASKS_WEATHER, **fields)
    assert streamed.finish_reason == "length"
    assert streamed.calls == calls_of(choice.message)


async def test_each_of_several_answers_has_its_calls(client: openai.AsyncOpenAI) -> None:
    answer = await ask(client, ASKS_WEATHER, tools=TOOLS, n=3)
    ids = [
        choice.message.tool_calls[0].id for choice in answer.choices if choice.message.tool_calls
    ]
    assert len(set(ids)) == 3


def forced(**parameters: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"tool_choice": "required", "tools": [tool]}


def chosen(kind: str, **named: Any) -> dict[str, Any]:
    return {"tool_choice": {"type": kind, **named}, "tools": TOOLS}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        (chosen("function"), "tool_choice"),
        (chosen("function", function={"name": "nobody"}), "tool_choice"),
        (chosen("custom", custom={"name": "add"}), "tool_choice"),
        (chosen("allowed_tools", allowed_tools={"mode": "auto", "tools": ["add"]}), "tool_choice"),
        (forced(type="array"), "tools[0].function.parameters"),
        (forced(properties={"a": {"type": "odd"}}), "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"extra_body": {"chat_template": "{{ messages }}"}}, "chat_template"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    client: openai.AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, ASKS_WEATHER, **fields)
    assert caught.value.param == param
