"""What the subjects of rewriting have in common: types of values, references, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = dict[str, Any] | bool

# JSON's types, with numbers in two: "number" is both.
FRACTION: Final = "fraction"
TYPES: Final = frozenset({"null", "boolean", "integer", FRACTION, "string", "array", "object"})

# Alternatives into which one keyword may be unfolded.
MAX_ALTERNATIVES: Final = 128
# Of references that lead to references, and of schemas within schemas, while one is reasoned about.
MAX_DEPTH: Final = 24

# Of each part of a message.
_MAX_CHARACTERS: Final = 150
# Those that say nothing of instances.
ANNOTATIONS: Final = frozenset(
    [
        *("$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding"),
        *("contentMediaType", "contentSchema", "default", "definitions", "deprecated"),
        *("description", "discriminator", "example", "examples", "id", "nullable", "readOnly"),
        *("title", "writeOnly", "x-guidance"),
    ]
)
# What llguidance knows how to enforce: others are annotations, as the standard has it.
FORMATS: Final = frozenset(
    [
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri", "unknown"),
    ]
)


class Refusal(Exception):
    """A schema that cannot be rewritten exactly; ``path`` is where, as a JSON pointer."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"the schema at {_short(path) or '/'}: {_short(reason)}")


def _short(text: str) -> str:
    """What a client has written may be long."""
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


class InexpressibleError(Exception):
    """There is no exact schema for what was asked for; the message says why."""


def pointer(path: str, *steps: str | int) -> str:
    """A JSON pointer, some steps further."""
    escaped = (str(step).replace("~", "~0").replace("/", "~1") for step in steps)
    return "".join([path, *("/" + step for step in escaped)])


def at(root: Any, reference: str) -> Any:
    """What a reference within the document leads to.

    Raises
    ------
    InexpressibleError
        It leads out of the document, or nowhere.
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
    """What the keyword ``type`` says."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return TYPES
    found = set(names) & TYPES
    return frozenset(found | {"integer", FRACTION} if "number" in names else found)


def typed(types: Iterable[str]) -> Schema:
    """A schema of these types.

    The one thing that is said in part only: numbers that are no integers have no schema of their
    own, so where integers are not meant no number is.
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
    """What holds where one of these does."""
    if True in options or {} in options:
        return True
    options = [option for option in options if option is not False]
    if not options:
        return False
    return options[0] if len(options) == 1 else {"anyOf": list(options)}


def all_of(parts: Sequence[Schema]) -> Schema:
    """What holds where all of these do."""
    if False in parts:
        return False
    parts = [part for part in parts if part is not True and part != {}]
    if not parts:
        return True
    return parts[0] if len(parts) == 1 else {"allOf": list(parts)}


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same one in JSON: 1 is 1.0 and is not true."""
    return key_of(one) == key_of(other)


def key_of(value: Any) -> str:
    """A text that is the same for the same value in JSON."""
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
    """The only values that a schema's own keywords allow, where it lists them."""
    values: list[Any] | None = None
    if isinstance(schema.get("enum"), list):
        values = list(schema["enum"])
    if "const" in schema:
        const = schema["const"]
        values = [const] if values is None or any(same(const, v) for v in values) else []
    if values is not None and "type" in schema:
        values = [value for value in values if type_of(value) in types_named(schema["type"])]
    return values
