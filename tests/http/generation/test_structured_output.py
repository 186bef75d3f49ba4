"""The fields by which clients say what an answer's text must be, at both endpoints."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from src.core.config import Config
from src.core.errors import InvalidRequestError
from src.core.structured_output import StructuredOutput
from src.http.generation.structured import structured_output
from src.http.protocol.completions import CompletionRequest
from src.http.protocol.generation import GenerationRequest
from src.http.protocol.structured import StructuredOutputs

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
OPEN: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
}
CHAT = {"messages": [{"role": "user", "content": "Say it."}]}
TEXT = {"prompt": "Say it:"}


async def answer(client: httpx.AsyncClient, **fields: Any) -> str:
    """The text of a chat and of a completion with these fields, which are the same or both odd."""
    texts = []
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        done = await client.post(path, json={**body, "max_tokens": 400, "seed": 3, **fields})
        assert done.status_code == 200, done.text
        (choice,) = done.json()["choices"]
        assert choice["finish_reason"] == "stop"
        texts.append(choice["text"] if "text" in choice else choice["message"]["content"])
    if fields.get("stream"):
        raise AssertionError("streams are read elsewhere")
    return str(texts[0])


@pytest.mark.parametrize("temperature", [0, 1, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "auto"},
    ],
)
async def test_every_spelling_of_a_schema_is_enforced(
    client: httpx.AsyncClient, fields: dict[str, Any], temperature: float
) -> None:
    jsonschema.validate(json.loads(await answer(client, temperature=temperature, **fields)), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-f]{3}-[0-9]+x"}}, "[a-f]{3}-[0-9]+x"),
        ({"guided_regex": "[a-f]{3}"}, "[a-f]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["ja/nein", "wohl \\ kaum"]}, r"ja/nein|wohl \\ kaum"),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]{2}/ "b"'}}, "a[0-9]{2}b"),
        ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
        (
            {
                "structured_outputs": {
                    "json": OPEN,
                    "disable_any_whitespace": True,
                    "disable_additional_properties": True,
                }
            },
            r'\{"ok": (true|false)\}',
        ),
        (
            {
                "structured_outputs": {
                    "json": OPEN,
                    "whitespace_pattern": "_?",
                    "disable_additional_properties": True,
                }
            },
            r'_?\{_?"ok"_?:_?(true|false)_?\}_?',
        ),
    ],
)
async def test_other_forms_hold_for_the_whole_text(
    client: httpx.AsyncClient, fields: dict[str, Any], pattern: str
) -> None:
    assert re.fullmatch(pattern, await answer(client, temperature=2, **fields))


async def test_any_object_is_an_object(client: httpx.AsyncClient) -> None:
    # A random model would not come to an end by itself.
    ends = {}
    for text in ('"', '":', "}"):
        asked = {"prompt": text, "add_special_tokens": False}
        (token_id,) = (await client.post("/tokenize", json=asked)).json()["tokens"]
        ends[str(token_id)] = 8.0
    fields = {"response_format": {"type": "json_object"}, "temperature": 1, "logit_bias": ends}
    objects = []
    for seed in range(8):
        body = {**CHAT, **fields, "max_tokens": 200, "seed": seed}
        done = await client.post("/v1/chat/completions", json=body)
        (choice,) = done.json()["choices"]
        assert choice["finish_reason"] == "stop", choice
        objects.append(json.loads(choice["message"]["content"]))
    assert all(isinstance(each, dict) for each in objects)
    assert any(objects), "none has a key"
    body = {**CHAT, **fields, "max_tokens": 1}
    (choice,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert re.fullmatch(r'\{["}\s]?', choice["message"]["content"])


async def test_free_text_may_be_asked_for_by_name(client: httpx.AsyncClient) -> None:
    fields = {"temperature": 0, "max_tokens": 8}
    plain = await client.post("/v1/completions", json={**TEXT, **fields})
    named = await client.post(
        "/v1/completions", json={**TEXT, **fields, "response_format": {"type": "text"}}
    )
    assert named.json()["choices"] == plain.json()["choices"]


async def test_a_streams_pieces_join_to_what_conforms(client: httpx.AsyncClient) -> None:
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    body = {**CHAT, **fields, "stream": True, "n": 3, "temperature": 2, "max_tokens": 400}
    done = await client.post("/v1/chat/completions", json=body)
    events = [json.loads(e[6:]) for e in done.text.split("\n\n") if e[6:].startswith("{")]
    texts = dict.fromkeys(range(3), "")
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    for text in texts.values():
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_schema_that_is_a_text_is_bounded_before_it_is_decoded() -> None:
    bound = Config().structured_output.max_bytes
    for text, words in (
        ("[" * (bound + 1), f"at most {bound} bytes"),
        ('{"enum": [' + "[]," * 70_000 + "[]]}", "objects, lists and keys"),
        ('{"enum": ' + "[" * 200 + "]" * 200 + "}", "levels deep"),
    ):
        for name, request in (
            ("guided_json", CompletionRequest(prompt="x", guided_json=text)),
            (
                "structured_outputs.json",
                CompletionRequest(prompt="x", structured_outputs=StructuredOutputs(json=text)),
            ),
        ):
            with pytest.raises(InvalidRequestError, match=words) as refusal:
                structured_output(request, Config())
            assert refusal.value.param == name
    # Brackets in the texts of a schema are no structure.
    long = json.dumps({"enum": ["[]" * 100_000]})
    assert structured_output(CompletionRequest(prompt="x", guided_json=long), Config()) is not None


async def test_a_form_is_read_once_for_all_prompts(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = []

    def counting(request: GenerationRequest, config: Config) -> StructuredOutput | None:
        form = structured_output(request, config)
        forms.append(form)
        return form

    monkeypatch.setattr("src.http.completions.handlers.structured_output", counting)
    body = {"prompt": ["a", "b", "c"], "guided_choice": ["x"], "max_tokens": 4}
    done = await client.post("/v1/completions", json=body)
    assert [choice["text"] for choice in done.json()["choices"]] == ["x"] * 3
    assert len(forms) == 1


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "schema": {"properties": {"tags": {"type": "array", "uniqueItems": True}}}
                    },
                }
            },
            "response_format",
            "the schema at /properties/tags/uniqueItems: ",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "with"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "got 2"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs", "empty"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice[0]", "str"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "no JSON schema"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", ""),
        ({"structured_outputs": {"json": False}}, "structured_outputs", ""),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "unknown name"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "with json",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "with guided_json"),
        (
            {"guided_choice": ["a"], "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
            "with guided_json",
        ),
        ({"guided_regex": "a", "stop_token_ids": [50]}, "stop_token_ids", "special"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_form_that_cannot_be_is_refused_by_its_name(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    body = CHAT if "chat" in path else TEXT
    done = await client.post(path, json={**body, **fields})
    error = done.json()["error"]
    assert (done.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
    assert "structured_output:" not in error["message"]
