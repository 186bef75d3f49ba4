"""The endpoints' description is true: of routes, of answers and of who may call them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from src.http.endpoints import ENDPOINTS
from src.http.openapi.bounds import BOUNDS
from src.http.openapi.document import openapi_document
from src.http.openapi.wording import describe_fields
from src.http.server.guard import DEBUG, METRICS
from tests.http.server.test_guard import ADMIN_WRITES, OPEN

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

DOCUMENT = openapi_document(ENDPOINTS, keys=True, admin=True, public_metrics=False)
PAGES = {(entry.path, entry.method) for entry in ENDPOINTS if entry.access == "page"}
VERBS = ("get", "post", "delete")


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item)


def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def test_every_endpoint_is_described_and_nothing_else() -> None:
    described = {(path, method.upper()) for path, method, _ in operations()}
    assert described == {(e.path.replace(":path", ""), e.method) for e in ENDPOINTS}


def test_every_reference_leads_somewhere() -> None:
    references = {node["$ref"] for node in walk(DOCUMENT) if isinstance(node.get("$ref"), str)}
    assert references
    for reference in references:
        node: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_every_schema_is_one() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(names) == len(set(names))


def test_security_is_what_the_guard_demands() -> None:
    for path, method, operation in operations():
        schemes = {name for entry in operation.get("security", []) for name in entry}
        if path.startswith(DEBUG) or path in ADMIN_WRITES:
            assert schemes == {"admin"}
        else:
            is_open = path in OPEN or (path, method.upper()) in PAGES
            assert schemes == (set() if is_open else {"bearer", "header"})
    bare = openapi_document(ENDPOINTS, keys=False, admin=False, public_metrics=False)
    assert not any(path.startswith(DEBUG) for path in bare["paths"])
    assert not any("security" in o for ops in bare["paths"].values() for o in ops.values())
    public = openapi_document(ENDPOINTS, keys=True, admin=False, public_metrics=True)
    assert "security" not in public["paths"][METRICS]["get"]


def test_bounds_are_of_fields_that_exist() -> None:
    names = {
        name
        for operation in ENDPOINTS
        if operation.request is not None
        for name in operation.request.__struct_fields__
    }
    assert set(BOUNDS) <= names


async def test_what_is_served_is_the_description_of_this_server(client: httpx.AsyncClient) -> None:
    answer = await client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    expected = openapi_document(ENDPOINTS, keys=False, admin=False, public_metrics=False)
    assert answer.json() == json.loads(json.dumps(expected))


async def test_the_page_shows_every_endpoint_and_fetches_nothing(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    html = answer.text
    paths = (await client.get("/openapi.json")).json()["paths"]
    for path, methods in paths.items():
        for method in methods:
            # A method has a column of its own, and a space where styles are not read.
            head = f'<span class="method {method}">{method.upper()}</span> '
            assert f'{head}<code class="path">{path}</code> ' in html
    text = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    assert "`" not in text
    assert "<code>n</code> times" in text
    assert "<script" not in html
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", html)
    targets = set(re.findall(r'href="#(\w+)"', html))
    assert targets <= set(re.findall(r'id="(\w+)"', html))


async def test_the_page_may_load_its_style_sheet_and_nothing_else(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.get("/docs")
    (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    named = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert f"style-src 'sha256-{named}';" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"<[^>]+ (?:style|on\w+)=", answer.text)


def test_descriptions_are_markdown() -> None:
    said = [node["description"] for node in walk(DOCUMENT) if "description" in node]
    said = [text for text in said if isinstance(text, str)]
    said += [operation["summary"] for _, _, operation in operations()]
    assert not [text for text in said if re.search(r"``|:\w+:`|^-{3,}$|^ +\S", text, re.MULTILINE)]
    fields = DOCUMENT["components"]["schemas"]["KVReport"]["properties"]
    expected = "Requests of `max_model_len` tokens that it holds."
    assert fields["requests_at_once"]["description"] == expected


DOCSTRING = """What there is; see :class:`~src.core.views.PoolView` and ``a, b``.

    More of it,
    over lines.

    Attributes
    ----------
    first, second
        The same ``thing``,
        twice.
    third
        Another.
    """


def test_what_is_said_of_attributes_stands_with_the_fields() -> None:
    fields: dict[str, dict[str, Any]] = {"first": {}, "second": {}, "third": {"description": "x"}}
    schema = {"description": DOCSTRING, "properties": fields}
    describe_fields(schema)
    about = "What there is; see `PoolView` and `a, b`.\n\nMore of it, over lines."
    assert schema["description"] == about
    assert fields["first"] == fields["second"] == {"description": "The same `thing`, twice."}
    assert fields["third"] == {"description": "x"}


ASKED: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/live", None),
    ("GET", "/ready", None),
    ("GET", "/health", None),
    ("GET", "/ping", None),
    ("POST", "/ping", None),
    ("GET", "/version", None),
    ("GET", "/get_load", None),
    ("GET", "/load", None),
    ("GET", "/is_sleeping", None),
    ("GET", "/tokenizer_info", None),
    ("GET", "/v1/models", None),
    ("POST", "/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [5]}),
    ("POST", "/v1/completions/render", {"prompt": "a", "logit_bias": {"5": 1}}),
    (
        "POST",
        "/v1/completions",
        {"prompt": "a", "max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1},
    ),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "n": 2, "return_token_ids": True}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "seed": 1}),
    (
        "POST",
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 2, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0,
        },
    ),
    ("POST", "/v1/chat/completions/render", {"messages": [{"role": "user", "content": "a"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
async def test_answers_are_as_described(
    client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
) -> None:
    operation = DOCUMENT["paths"][path][method.lower()]
    if body is not None:
        content = operation["requestBody"]["content"]["application/json"]
        validator(content["schema"]).validate(body)
    answer = await client.request(method, path, json=body)
    assert answer.status_code == 200, answer.text
    described = operation["responses"]["200"]
    validator(described["content"]["application/json"]["schema"]).validate(answer.json())
    # What is not described must not be there either.
    schema = described["content"]["application/json"]["schema"]
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        known = DOCUMENT["components"]["schemas"][name]["properties"]
        assert set(answer.json()) <= set(known)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "temperature": 3}),
        ("/v1/completions", {"prompt": "a", "n": 0}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/v1/completions", {"prompt": "a", "stop": ""}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 101}}),
        ("/v1/completions", {"prompt": "a", "bad_words": [""]}),
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
async def test_what_the_description_forbids_is_refused_as_described(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    assert not validator(content["schema"]).is_valid(body)
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    refused = DOCUMENT["components"]["responses"]["400"]["content"]["application/json"]
    validator(refused["schema"]).validate(answer.json())
