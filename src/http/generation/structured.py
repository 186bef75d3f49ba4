"""From the fields by which clients constrain an answer's text to the one that the engine knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from src.core.config import Config
from src.core.errors import InvalidRequestError
from src.core.structured_output import Kind, StructuredOutput
from src.http.protocol.generation import GenerationRequest
from src.http.protocol.structured import ResponseFormat, StructuredOutputs
from src.http.server.body import check_short_structure

_FIELDS: Final = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")
# What the older field for a library may say: nothing, or the one that is used.
_BACKENDS: Final = ("auto", "guidance")

_encode: Final = msgspec.json.Encoder().encode


def structured_output(request: GenerationRequest, config: Config) -> StructuredOutput | None:
    """What the text must conform to; ``None`` where it is free.

    Raises
    ------
    InvalidRequestError
        The fields contradict one another, ask for what is not there, or are larger than ``config``
        allows; names the field.
    """
    name = _field(request)
    if name is None:
        if request.guided_whitespace_pattern is not None:
            raise _invalid("guided_whitespace_pattern", "may only be given with guided_json")
        return None
    if name == "response_format":
        assert request.response_format is not None
        output = _of_response_format(request.response_format)
    elif name == "structured_outputs":
        assert request.structured_outputs is not None
        output = _of_structured_outputs(request.structured_outputs, config)
    else:
        output = _of_guided(request, name, config)
    texts = (output.value,) if isinstance(output.value, str) else output.value
    _check_size(name, sum(map(len, texts)), config)
    return output


def given_field(request: GenerationRequest) -> str:
    """The field by which a client says what the text conforms to, or whose schemas do."""
    given = _given(request, _FIELDS)
    return given[0] if given else "tools"


def _field(request: GenerationRequest) -> str | None:
    """The field that asks for something."""
    backend = request.guided_decoding_backend
    if backend is not None and backend not in _BACKENDS:
        raise _unsupported("guided_decoding_backend", f" of {backend[:50]!r}")
    given = _given(request, _FIELDS)
    if len(given) > 1:
        raise _invalid(given[1], f"may not be given together with {given[0]}")
    return given[0] if given else None


def _given(fields: msgspec.Struct, names: Sequence[str]) -> list[str]:
    found = [name for name in names if getattr(fields, name) is not None]
    form = getattr(fields, "response_format", None)
    if form is not None and form.type == "text":
        for name in ("json_schema", "schema"):
            if getattr(form, name) is not None:
                raise _invalid(f"response_format.{name}", "may not be given for type text")
        found.remove("response_format")
    return found


def _of_response_format(form: ResponseFormat) -> StructuredOutput:
    if form.type not in ("json_object", "json_schema"):
        raise _unsupported("response_format", f" of type {form.type[:50]!r}")
    if form.json_schema is not None:
        if form.type == "json_object":
            raise _invalid("response_format.json_schema", "may only be given for type json_schema")
        if form.schema is not None:
            raise _invalid("response_format.schema", "may not be given together with json_schema")
        if form.json_schema.schema is None:
            raise _invalid("response_format.json_schema.schema", "is required")
        return StructuredOutput(kind="json_schema", value=_text(form.json_schema.schema))
    if form.schema is not None:
        return StructuredOutput(kind="json_schema", value=_text(form.schema))
    if form.type == "json_schema":
        raise _invalid("response_format.json_schema", "is required for type json_schema")
    return StructuredOutput.json_object()


def _of_structured_outputs(fields: StructuredOutputs, config: Config) -> StructuredOutput:
    if fields.structural_tag is not None:
        raise _unsupported("structured_outputs.structural_tag")
    given = [name for name in _given(fields, _KINDS) if getattr(fields, name) is not False]
    if len(given) != 1:
        names = ", ".join(_KINDS)
        raise _invalid("structured_outputs", f"must have exactly one of {names}, got {len(given)}")
    kind = given[0]
    compact = bool(fields.disable_any_whitespace)
    value = getattr(fields, kind)
    if kind == "json_object":
        value = {"type": "object"}
        kind = "json"
    if kind == "json":
        schema = _decoded("structured_outputs.json", value, config)
        if fields.disable_additional_properties:
            _close_objects(schema)
        return StructuredOutput(
            kind="json_schema",
            value=_text(schema),
            any_whitespace=not compact,
            whitespace_pattern=fields.whitespace_pattern,
        )
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(fields, name):
            raise _invalid(f"structured_outputs.{name}", "may only be given with json")
    return _plain(kind, value)


def _of_guided(fields: GenerationRequest, name: str, config: Config) -> StructuredOutput:
    value = getattr(fields, name)
    if name == "guided_json":
        return StructuredOutput(
            kind="json_schema",
            value=_text(_decoded(name, value, config)),
            whitespace_pattern=fields.guided_whitespace_pattern,
        )
    if fields.guided_whitespace_pattern is not None:
        raise _invalid("guided_whitespace_pattern", "may only be given with guided_json")
    return _plain(name.removeprefix("guided_"), value)


def _plain(kind: str, value: str | list[str]) -> StructuredOutput:
    kinds: dict[str, Kind] = {"regex": "regex", "choice": "choice", "grammar": "grammar"}
    return StructuredOutput(
        kind=kinds[kind], value=value if isinstance(value, str) else tuple(value)
    )


def _decoded(
    name: str, schema: dict[str, Any] | bool | str, config: Config
) -> dict[str, Any] | bool:
    if not isinstance(schema, str):
        return schema
    _check_size(name, len(schema), config)
    http = config.http
    check_short_structure(
        schema,
        max_nodes=http.max_json_nodes,
        max_values=http.max_json_values,
        what=name,
        param=name,
    )
    try:
        return msgspec.json.decode(schema, type=dict[str, Any] | bool)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _invalid(name, f"is no JSON schema: {error}") from None


def _close_objects(schema: dict[str, Any] | bool) -> None:
    """Allow no properties that a schema does not name, wherever it does not say, in place."""
    todo: list[Any] = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            if "properties" in node:
                node.setdefault("additionalProperties", False)
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)


def _text(schema: dict[str, Any] | bool) -> str:
    return _encode(schema).decode()


def _check_size(name: str, size: int, config: Config) -> None:
    # Of characters: the engine looks at bytes. This only keeps the event loop from long texts.
    most = config.structured_output.max_bytes
    if size > most:
        raise _invalid(name, f"may have at most {most} bytes, got {size}")


def _invalid(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {problem}", param=name)


def _unsupported(name: str, what: str = "") -> InvalidRequestError:
    return InvalidRequestError(
        f"{name}{what} is not supported by this server", param=name, code="unsupported_parameter"
    )
