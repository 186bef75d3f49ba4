"""The OpenAPI document."""

from __future__ import annotations

import functools
import inspect
import re
from http import HTTPStatus
from typing import Any, Final, TypeAlias

import msgspec

from src.core.version import VERSION
from src.http.openapi.bounds import bound, describe_use
from src.http.openapi.operations import JSON, Operation
from src.http.openapi.wording import describe_fields, markdown
from src.http.protocol.errors import ErrorBody
from src.http.server.error_format import AnthropicErrorBody

Schema: TypeAlias = dict[str, Any]

_TEMPLATE: Final = "#/components/schemas/{name}"
_REQUEST_ID: Final = {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}}


def openapi_document(
    endpoints: tuple[Operation, ...],
    *,
    keys: bool,
    admin: bool,
    public_metrics: bool,
    page: bool = True,
) -> Schema:
    """Everything about the endpoints that a program can know beforehand.

    ``keys`` says that there are API keys, ``admin`` that there is an admin key: without one nothing
    of ``/debug`` exists, and nothing is said of it. ``page`` says that there is a page at ``/``.
    """
    schemas, components = _schemas(endpoints)
    paths: dict[str, Schema] = {}
    for operation in endpoints:
        if not {"admin": admin, "page": page}.get(operation.access, True):
            continue
        described = _described(operation, schemas)
        if operation.access == "admin":
            described["security"] = [{"admin": []}]
        elif keys and operation.access not in ("open", "page", "metrics" if public_metrics else ""):
            described["security"] = [{"bearer": []}, {"header": []}]
        methods = paths.setdefault(operation.path.replace(":path}", "}"), {})
        methods[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Slipstream",
            "version": VERSION,
            "description": "OpenAI's protocol with vLLM's extensions, and Anthropic's messages.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {
                f"{prefix}{status}": _refusal(status, kind)
                for kind, prefix in _RESPONSES.items()
                for status in _REFUSALS
            },
            "headers": {"RequestId": {"schema": {"type": "string"}}},
            "securitySchemes": _security(keys=keys, admin=admin),
        },
    }


# Type of an error -> what the names of its responses begin with
_RESPONSES: Final[dict[Any, str]] = {ErrorBody: "", AnthropicErrorBody: "Anthropic"}
_REFUSALS: Final = (400, 401, 403, 404, 408, 409, 413, 415, 429, 500, 503)


@functools.cache
def _schemas(endpoints: tuple[Operation, ...]) -> tuple[dict[Any, Schema], dict[str, Schema]]:
    """The schema of every type of a body, and what these refer to."""
    requests = {op.request for op in endpoints if op.request is not None}
    types = [*requests, *_RESPONSES]
    for operation in endpoints:
        types += [kind for kind in operation.answers.values() if kind not in (None, *types)]
    references, components = msgspec.json.schema_components(types, ref_template=_TEMPLATE)
    for component in components.values():
        describe_fields(component)
    for kind in requests:
        for name, schema in components[kind.__name__]["properties"].items():
            bound(name, schema)
            describe_use(kind, name, schema)
    return dict(zip(types, references, strict=True)), components


def _described(operation: Operation, schemas: dict[Any, Schema]) -> Schema:
    method, path = operation.method.lower(), operation.path.replace(":path", "")
    summary = markdown((inspect.getdoc(operation.handler) or "").partition("\n")[0])
    described: Schema = {
        "tags": [operation.tag],
        "summary": summary,
        "operationId": method + re.sub(r"\W+", "_", path).rstrip("_"),
        "responses": {
            **{str(status): _answer(operation, schemas, status) for status in operation.answers},
            **{
                str(status): {
                    "$ref": f"#/components/responses/{_RESPONSES[operation.error]}{status}"
                }
                for status in operation.refusals
                if status not in operation.answers
            },
        },
    }
    if operation.parameters:
        described["parameters"] = [
            {"name": p.name, "in": p.place, "required": p.place == "path", "schema": p.schema}
            for p in operation.parameters
        ]
    if operation.request is not None:
        content = {JSON: {"schema": schemas[operation.request]}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _answer(operation: Operation, schemas: dict[Any, Schema], status: int) -> Schema:
    kind = operation.answers[status]
    schema: Schema = {} if kind is None else schemas[kind]
    content: Schema = {operation.kind if kind is None else JSON: {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "description": HTTPStatus(status).phrase,
        "headers": _REQUEST_ID,
        "content": content,
    }


def _refusal(status: int, kind: Any) -> Schema:
    headers: Schema = dict(_REQUEST_ID)
    text = {"schema": {"type": "string"}}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = text
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers["Retry-After"] = text
    schema = {"$ref": _TEMPLATE.format(name=kind.__name__)}
    return {
        "description": HTTPStatus(status).phrase,
        "headers": headers,
        "content": {JSON: {"schema": schema}},
    }


def _security(*, keys: bool, admin: bool) -> Schema:
    schemes: Schema = {}
    if keys:
        schemes["bearer"] = {"type": "http", "scheme": "bearer"}
        schemes["header"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    if admin:
        schemes["admin"] = {"type": "http", "scheme": "bearer", "description": "The admin key."}
    return schemes
