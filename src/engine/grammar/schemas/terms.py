"""Common terms of the rewriting: types of values, references, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = dict[str, Any] | bool

# JSON's types, with numbers as two types: "number" is integers and fractions.
FRACTION: Final = "fraction"
TYPES: Final = frozenset({"null", "boolean", "integer", FRACTION, "string", "array", "object"})

# The most alternatives into which one keyword may be unfolded.
MAX_ALTERNATIVES: Final = 128
# The greatest depth of references and of nested schemas that is followed.
MAX_DEPTH: Final = 24

# The most characters of each part of a message.
_MAX_CHARACTERS: Final = 150
# Keywords that do not restrict instances.
ANNOTATIONS: Final = frozenset(
    [
        *("$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding"),
        *("contentMediaType", "contentSchema", "default", "definitions", "deprecated"),
        *("description", "discriminator", "example", "examples", "id", "nullable", "readOnly"),
        *("title", "writeOnly", "x-guidance"),
    ]
)
# Formats that llguidance enforces. According to the standard others are annotations.
FORMATS: Final = frozenset(
    [
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri", "unknown"),
    ]
)


class Refusal(Exception):
    """A schema that cannot be rewritten exactly; ``path`` is the place as a JSON pointer."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"the schema at {_short(path) or '/'}: {_short(reason)}")


def _short(text: str) -> str:
    """Shorten a client's text, which may be long."""
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


class InexpressibleError(Exception):
    """No schema expresses the wanted values exactly; the message says why."""


def pointer(path: str, *steps: str | int) -> str:
    """The JSON pointer ``path`` with further steps."""
    escaped = (str(step).replace("~", "~0").replace("/", "~1") for step in steps)
    return "".join([path, *("/" + step for step in escaped)])


def at(root: Any, reference: str) -> Any:
    """The target of a reference within the document.

    Raises
    ------
    InexpressibleError
        The target is in another document, or does not exist.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise InexpressibleError("it refers to another document, or by a name")
    found = root
    for step in unquote(reference[1:]).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise InexpressibleError(f"{reference} leads nowhere") from None
    return found


def type_of(value: Any) -> str:
    """The type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else FRACTION
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def types_named(given: Any) -> frozenset[str]:
    """The types that the keyword ``type`` names."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return TYPES
    found = set(names) & TYPES
    return frozenset(found | {"integer", FRACTION} if "number" in names else found)


def typed(types: Iterable[str]) -> Schema:
    """A schema of these types.

    It is inexact in one case: there is no schema for fractions without integers, so fractions are
    then left out.
    """
    names = set(types)
    if FRACTION in names:
        names.discard(FRACTION)
        if "integer" in names:
            names = names - {"integer"} | {"number"}
    ordered = sorted(names)
    if not ordered:
        return False
    return {"type": ordered[0] if len(ordered) == 1 else ordered}


def any_of(options: Sequence[Schema]) -> Schema:
    """A schema that holds where at least one of these holds."""
    if True in options or {} in options:
        return True
    options = [option for option in options if option is not False]
    if not options:
        return False
    return options[0] if len(options) == 1 else {"anyOf": list(options)}


def all_of(parts: Sequence[Schema]) -> Schema:
    """A schema that holds where all of these hold."""
    if False in parts:
        return False
    parts = [part for part in parts if part is not True and part != {}]
    if not parts:
        return True
    return parts[0] if len(parts) == 1 else {"allOf": list(parts)}


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON: 1 equals 1.0 and does not equal true."""
    return key_of(one) == key_of(other)


def key_of(value: Any) -> str:
    """A text that is the same for equal JSON values."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_plain(item) for item in value]
        case dict():
            return {key: _plain(item) for key, item in value.items()}
    return value


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema's own keywords list; ``None`` if they list none."""
    values: list[Any] | None = None
    if isinstance(schema.get("enum"), list):
        values = list(schema["enum"])
    if "const" in schema:
        const = schema["const"]
        values = [const] if values is None or any(same(const, v) for v in values) else []
    if values is not None and "type" in schema:
        values = [value for value in values if type_of(value) in types_named(schema["type"])]
    return values
