"""Forms of an answer: none is taken and then not enforced.

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
    post,
    refused,
)

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
