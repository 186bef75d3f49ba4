"""What a request may want its answer's text to be, in OpenAI's words and in vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A schema with a name. It is enforced whether ``strict`` or not."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """``text``, ``json_object`` or ``json_schema``; ``schema`` is where llama.cpp has a schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """One of the first five, and how it is meant; ``json`` may be text or the schema itself."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    # There is no other library to fall back to.
    disable_fallback: bool | None = None
    whitespace_pattern: str | None = None
