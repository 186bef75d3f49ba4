"""Kinds of faults that users of other servers and clients have reported: requests and refusals.

Streams, log-probabilities and usage are in `test_public_reports_streams.py`. The reports are
listed by kind in docs/clients.md, "Tried from public reports".
"""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.core.config import Config, ModelSection, Secret
from src.http import create_app
from tests.http.conftest import CONTEXT

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASKS_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather.", "parameters": CITY},
}
# No answer has it by chance.
ODD_SCHEMA = {
    "type": "object",
    "properties": {"zz": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["zz"],
    "additionalProperties": False,
}
JSON_TYPE = {"content-type": "application/json"}


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def refused(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# Forms of an answer: none is taken and then not enforced.


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": ODD_SCHEMA},
        {"type": "json_schema", "schema": ODD_SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": ODD_SCHEMA, "strict": None}},
    ],
    ids=["json_object", "json_schema", "nulls"],
)
async def test_a_schema_is_enforced_wherever_clients_put_it(
    demo_client: httpx.AsyncClient, form: dict[str, Any]
) -> None:
    answer = await post(
        demo_client,
        CHAT,
        messages=ASKS_WEATHER,
        temperature=0,
        max_tokens=300,
        response_format=form,
    )
    assert list(json.loads(answer["choices"][0]["message"]["content"])) == ["zz"]


@pytest.mark.parametrize(
    ("form", "param"),
    [
        (
            {"type": "json_schema", "schema": ODD_SCHEMA, "json_schema": {"schema": ODD_SCHEMA}},
            "response_format.schema",
        ),
        ({"type": "text", "schema": ODD_SCHEMA}, "response_format.schema"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": ODD_SCHEMA}, "response_format.json_schema.schema"),
        ({"type": "json", "value": ODD_SCHEMA}, "response_format"),
    ],
)
async def test_a_form_that_contradicts_itself_is_refused(
    demo_client: httpx.AsyncClient, form: dict[str, Any], param: str
) -> None:
    error = await refused(demo_client, CHAT, messages=ASKS_WEATHER, response_format=form)
    assert error["param"] == param


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", ["grammar", "json_schema", "regex", "ebnf"])
async def test_other_servers_fields_for_a_form_are_refused_by_name(
    demo_client: httpx.AsyncClient, path: str, field: str
) -> None:
    asked = {"messages": ASKS_WEATHER} if path == CHAT else {"prompt": "a"}
    error = await refused(demo_client, path, **asked, **{field: "x"})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    await post(demo_client, path, **asked, max_tokens=1, **{field: None})


async def test_white_space_in_json_comes_to_an_end(demo_client: httpx.AsyncClient) -> None:
    spaces = [
        (await post(demo_client, "/tokenize", prompt=text, add_special_tokens=False))["tokens"][0]
        for text in (" ", "\n", "\t")
    ]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    closed = {**schema, "additionalProperties": False}
    answer = await post(
        demo_client,
        CHAT,
        messages=ASKS_WEATHER,
        temperature=0,
        max_tokens=500,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": closed}},
        logit_bias={str(token): 100 for token in spaces},
    )
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert list(json.loads(choice["message"]["content"])) == ["a"]


@pytest.mark.parametrize("wanted", ["a", "ab", "abc", "京", "京都"])
async def test_a_choice_that_begins_another_one_can_be_chosen_and_so_can_the_other(
    demo_client: httpx.AsyncClient, wanted: str
) -> None:
    ids = await post(demo_client, "/tokenize", prompt=wanted, add_special_tokens=False)
    answer = await post(
        demo_client,
        COMPLETIONS,
        prompt="x",
        max_tokens=16,
        temperature=0,
        guided_choice=["a", "ab", "abc", "京", "京都"],
        # The end of the text is the only other token.
        allowed_token_ids=[*ids["tokens"], 1],
        logit_bias={str(token): 50 for token in ids["tokens"]},
    )
    assert answer["choices"][0]["text"] == wanted
    assert answer["choices"][0]["finish_reason"] == "stop"


# Sampling parameters within the published ranges


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_top_p_of_0_takes_the_likeliest_token(
    demo_client: httpx.AsyncClient, path: str
) -> None:
    asked: dict[str, Any] = {"temperature": 2, "top_p": 0}
    texts = set()
    for seed in range(4):
        if path == RESPONSES:
            body = {"input": "Tell me", "max_output_tokens": 16, "seed": seed, **asked}
            answer = await post(demo_client, path, **body)
            texts.add(answer["output"][0]["content"][0]["text"])
        else:
            messages = [{"role": "user", "content": "Tell me"}]
            answer = await post(
                demo_client, path, messages=messages, max_tokens=16, seed=seed, **asked
            )
            if path == CHAT:
                texts.add(answer["choices"][0]["message"]["content"])
            else:
                texts.add(answer["content"][0]["text"])
    assert len(texts) == 1


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 5e-324])
async def test_a_temperature_next_to_0_is_greedy_and_no_nan(
    demo_client: httpx.AsyncClient, temperature: float
) -> None:
    asked = {"messages": ASKS_WEATHER, "max_tokens": 12, "logprobs": True}
    greedy = await post(demo_client, CHAT, temperature=0, **asked)
    answer = await post(demo_client, CHAT, temperature=temperature, seed=1, **asked)
    assert answer["choices"] == greedy["choices"]
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": -1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"top_k": 0},
        {"top_k": -1},
        {"stop": []},
        {"stop": None},
        # What an editor sends for every completion.
        {"stop": [f"<|{name}|>" for name in "abcdefghijklmn"]},
        {"logit_bias": {}},
        {"tools": []},
        {"top_logprobs": 0},
    ],
    ids=str,
)
async def test_values_that_change_nothing_are_taken(
    demo_client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    await post(demo_client, CHAT, messages=ASKS_WEATHER, max_tokens=1, **fields)


async def test_null_is_as_if_a_field_were_not_there(demo_client: httpx.AsyncClient) -> None:
    names = (
        "temperature top_p n stop seed max_completion_tokens presence_penalty frequency_penalty "
        "logit_bias logprobs top_logprobs tools tool_choice response_format user stream "
        "stream_options parallel_tool_calls metadata store service_tier reasoning_effort "
        "modalities audio prediction functions function_call verbosity web_search_options model"
    )
    asked = {"messages": ASKS_WEATHER, "max_tokens": 2, "temperature": 0}
    plain = await post(demo_client, CHAT, **asked)
    nulls = await post(demo_client, CHAT, **{**dict.fromkeys(names.split()), **asked})
    assert nulls["choices"] == plain["choices"]
    assert nulls["usage"]["completion_tokens"] == 2


async def test_fields_of_a_message_that_nobody_knows_are_passed_over(
    demo_client: httpx.AsyncClient,
) -> None:
    asked = {"max_tokens": 4, "temperature": 0}
    plain = await post(demo_client, CHAT, messages=ASKS_WEATHER, **asked)
    more = {"id": 1947269257, "opts": {"visible": False}, "refusal": None, "annotations": []}
    answer = await post(demo_client, CHAT, messages=[{**ASKS_WEATHER[0], **more}], **asked)
    assert answer["choices"] == plain["choices"]


async def test_a_rendered_conversation_begins_once(demo_client: httpx.AsyncClient) -> None:
    tokens = (await post(demo_client, "/tokenize", messages=ASKS_WEATHER))["tokens"]
    bos = (await post(demo_client, "/tokenize", prompt=""))["tokens"]
    assert len(bos) == 1
    assert tokens.count(bos[0]) == tokens[:1].count(bos[0]) <= 1
    usage = (await post(demo_client, CHAT, messages=ASKS_WEATHER, max_tokens=1))["usage"]
    assert usage["prompt_tokens"] == len(tokens)
    answer = await post(demo_client, RESPONSES, input=ASKS_WEATHER, max_output_tokens=16)
    assert answer["usage"]["input_tokens"] == len(tokens)
    counted = await post(demo_client, f"{MESSAGES}/count_tokens", messages=ASKS_WEATHER)
    assert counted["input_tokens"] == len(tokens)
    # A text has it once too, whoever asks.
    text = (await post(demo_client, "/tokenize", prompt="a"))["tokens"]
    assert text[0] == bos[0] != text[1]


# What does not fit the context: each protocol's clients look for its own words.


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 1200}]}, "messages"),
        (COMPLETIONS, {"prompt": "word " * 1200}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 1200}, "prompt"),
        (CHAT, {"messages": ASKS_WEATHER, "max_tokens": 9000}, "max_tokens"),
        (CHAT, {"messages": ASKS_WEATHER, "max_completion_tokens": 9000}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 9000}, "max_tokens"),
        (RESPONSES, {"input": "word " * 1200}, "input"),
        (RESPONSES, {"input": "a", "max_output_tokens": 9000}, "max_output_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 15_000}]}, "messages"),
    ],
)
async def test_what_is_too_long_for_the_context_is_said_in_openais_words(
    demo_client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    error = await refused(demo_client, path, **body)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]


async def test_what_is_too_long_for_the_context_is_said_in_anthropics_words(
    demo_client: httpx.AsyncClient,
) -> None:
    long = [{"role": "user", "content": "word " * 1200}]
    error = await refused(demo_client, MESSAGES, messages=long, max_tokens=5)
    assert error["type"] == "invalid_request_error"
    count = await post(demo_client, f"{MESSAGES}/count_tokens", messages=long)
    assert error["message"] == (
        f"prompt is too long: {count['input_tokens']} tokens > {CONTEXT} maximum"
    )
    short = await post(demo_client, f"{MESSAGES}/count_tokens", messages=ASKS_WEATHER)
    error = await refused(demo_client, MESSAGES, messages=ASKS_WEATHER, max_tokens=32_000)
    assert error["message"] == (
        f"input length and `max_tokens` exceed context limit: {short['input_tokens']} + 32000 > "
        f"{CONTEXT}, decrease input length or `max_tokens` and try again"
    )
    longer = [{"role": "user", "content": "word " * 15_000}]
    error = await refused(demo_client, MESSAGES, messages=longer, max_tokens=5)
    assert error["message"].startswith("prompt is too long: ")


# Bodies as clients encode them


BODY = json.dumps({"messages": ASKS_WEATHER, "max_tokens": 1, "temperature": 0}).encode()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("identity", BODY),
        ("gzip", gzip.compress(BODY)),
        ("x-gzip", gzip.compress(BODY[:40]) + gzip.compress(BODY[40:])),
        ("GZip", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("deflate, gzip", gzip.compress(zlib.compress(BODY))),
        (None, b"\xef\xbb\xbf" + BODY),
        (None, BODY + b"\r\n"),
    ],
)
async def test_a_body_is_read_as_it_is_coded(
    demo_client: httpx.AsyncClient, coding: str | None, body: bytes
) -> None:
    headers = JSON_TYPE if coding is None else {**JSON_TYPE, "content-encoding": coding}
    answer = await demo_client.post(CHAT, content=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("coding", ["zstd", "br", "gzip, zstd", "gzip, gzip, gzip, gzip, gzip"])
async def test_a_coding_that_is_not_read_is_refused_by_name(
    demo_client: httpx.AsyncClient, coding: str
) -> None:
    headers = {**JSON_TYPE, "content-encoding": coding}
    answer = await demo_client.post(CHAT, content=BODY, headers=headers)
    assert answer.status_code == 415
    assert "content-encoding" in answer.json()["error"]["message"]
    assert "gzip" in answer.headers["accept-encoding"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"no gzip", 400),
        (gzip.compress(BODY)[:-9], 400),
        (gzip.compress(BODY) + b"rest", 400),
        # A hundred times as long as it looks, and longer than bodies may be.
        (gzip.compress(b" " * 50_000_000), 413),
        (gzip.compress(gzip.compress(b" " * 50_000_000)), 400),
    ],
)
async def test_a_coded_body_that_is_broken_or_a_bomb_is_refused(
    demo_client: httpx.AsyncClient, body: bytes, status: int
) -> None:
    headers = {**JSON_TYPE, "content-encoding": "gzip"}
    answer = await demo_client.post(CHAT, content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


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


# Paths, methods, keys


@pytest.mark.parametrize("name", ["org/demo", "org%2Fdemo"])
async def test_a_model_whose_name_has_a_slash_is_found(app: Starlette, name: str) -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
        name = name.replace("demo", "alias")
        answer = await client.get(f"/v1/models/{name}")
        assert (answer.status_code, answer.json()["id"]) == (200, "org/alias")


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/v1/models", "/metrics"])
async def test_head_is_get_without_a_body(demo_client: httpx.AsyncClient, path: str) -> None:
    answer = await demo_client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("tokens", [[-1], [2**31], [2**63], [2**70], [10**6]])
@pytest.mark.parametrize("path", ["/detokenize", COMPLETIONS])
async def test_ids_of_no_token_are_refused(
    demo_client: httpx.AsyncClient, path: str, tokens: list[int]
) -> None:
    param = "tokens" if path == "/detokenize" else "prompt"
    assert (await refused(demo_client, path, **{param: tokens}))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [10**6], "min_tokens": 1}, "stop_token_ids"),
        ({"stop_token_ids": [-5], "min_tokens": 1}, "stop_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"n": 0, "stream": True}, "n"),
        ({"n": 0}, "n"),
        ({"stream": True, "stream_options": {"include_usage": "True"}}, None),
    ],
)
async def test_what_has_ended_other_engines_is_refused_and_the_next_request_served(
    demo_client: httpx.AsyncClient, fields: dict[str, Any], param: str | None
) -> None:
    error = await refused(demo_client, CHAT, messages=ASKS_WEATHER, max_tokens=2, **fields)
    assert error["param"] == (param or "stream_options.include_usage")
    await post(demo_client, CHAT, messages=ASKS_WEATHER, max_tokens=1)


async def test_a_browser_may_ask_first_and_may_read_refusals(config: Config) -> None:
    http = msgspec.structs.replace(
        config.http, api_keys=(Secret("k1"),), cors_origins=("https://app.example",)
    )
    keyed = msgspec.structs.replace(config, http=http, model=ModelSection())
    app = create_app(keyed, owns_process=False)
    origin = {"origin": "https://app.example"}
    names = "authorization,content-type,x-stainless-retry-count,anthropic-version"
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client,
    ):
        asked = {
            **origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": names,
        }
        answer = await client.options(CHAT, headers=asked)
        assert answer.status_code == 200
        assert set(names.split(",")) <= set(
            answer.headers["access-control-allow-headers"].split(",")
        )
        answer = await client.post(CHAT, json={"messages": ASKS_WEATHER}, headers=origin)
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        # The scheme's name is in no particular case.
        answer = await client.get("/v1/models", headers={"authorization": "bearer k1"})
        assert answer.status_code != 401
