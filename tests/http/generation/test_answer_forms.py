"""Kinds of faults that users of other servers and clients have reported: fields and their values.

The reports are listed by kind in docs/clients.md, "Tried from public reports".
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.http.asking import (
    ASKS_WEATHER,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    post,
    refused,
)
from tests.http.conftest import CONTEXT

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

# No answer has it by chance.
ODD_SCHEMA = {
    "type": "object",
    "properties": {"zz": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["zz"],
    "additionalProperties": False,
}


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
