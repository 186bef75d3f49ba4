"""Arguments written as bare text, converted to JSON by the types in the function's schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from src.text.source import MismatchError, Source, finished
from src.text.tool_calls.json_values import is_value
from src.text.tool_calls.python_values import read_literal

Kinds: TypeAlias = frozenset[str]
"""Types of JSON Schema; a set with ``number`` also has ``integer``."""

ANY: Final[Kinds] = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
TEXT: Final[Kinds] = frozenset({"string"})

# A bool is an int as well.
_KINDS_OF_TYPES: Final[tuple[tuple[type, Kinds], ...]] = (
    (bool, frozenset({"boolean"})),
    (int, frozenset({"number", "integer"})),
    (float, frozenset({"number"})),
    (str, TEXT),
    (type(None), frozenset({"null"})),
    (Mapping, frozenset({"object"})),
    (list, frozenset({"array"})),
)
_MAX_DEPTH: Final = 16
"""Bound on nested references and combinations; deeper schemas count as any type."""
_BLANK: Final = " \t\r\n"


def kinds_of_arguments(parameters: Mapping[str, Any]) -> dict[str, Kinds]:
    """Return the types of a function's arguments by name; arguments without a name may be any."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    reader = _SchemaReader(parameters)
    return {name: reader.kinds(schema) for name, schema in properties.items()}


def json_of(text: str, kinds: Kinds) -> str:
    """Return the JSON of a value that is written as this text.

    Text that is no value of these types becomes a string.
    """
    if kinds == TEXT:
        return _quoted(text)
    stripped = text.strip(_BLANK)
    if _kind_of_json(stripped) & kinds:
        return stripped
    written = _json_of_literal(stripped)
    if written is not None and _kind_of_json(written) & kinds:
        return written
    return _quoted(text)


def quoted_inside(text: str) -> str:
    """Return the text as it stands inside the quotes of a JSON string."""
    return _quoted(text)[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _kind_of_json(text: str) -> Kinds:
    """Return the types of the value that this JSON text is; empty if it is not JSON."""
    if not text or text[0] == '"' or not is_value(text):
        return frozenset()
    match text[0]:
        case "{":
            return frozenset({"object"})
        case "[":
            return frozenset({"array"})
        case "t" | "f":
            return frozenset({"boolean"})
        case "n":
            return frozenset({"null"})
    number = frozenset({"number"})
    try:
        is_whole = float(text).is_integer()
    except (OverflowError, ValueError):
        is_whole = False
    return number | {"integer"} if is_whole else number


def _json_of_literal(text: str) -> str | None:
    """Return the JSON of a Python literal, as some templates show values to models, or None."""
    if not text or text[0] in "'\"":
        return None
    source = Source()
    source.feed(text)
    source.end()
    try:
        value = finished(read_literal(source))
        if finished(source.peek()):
            return None
    except MismatchError:
        return None
    return json.dumps(value, ensure_ascii=False)


class _SchemaReader:
    """Tells which types a function's schemas admit. What it does not understand admits any."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[str, Kinds] = {}

    def kinds(self, schema: Any, depth: int = 0) -> Kinds:
        """The kinds of this schema's values."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ANY
        found = ANY
        if isinstance(reference := schema.get("$ref"), str):
            found &= self._referred(reference, depth)
        if (named := schema.get("type")) is not None:
            found &= _named(named if isinstance(named, list) else [named])
        if isinstance(values := schema.get("enum"), list):
            found &= _of_values(values)
        if "const" in schema:
            found &= _of_values([schema["const"]])
        for key in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(key), list):
                found &= self._union(branches, depth)
        if isinstance(branches := schema.get("allOf"), list):
            for branch in branches:
                found &= self.kinds(branch, depth + 1)
        if schema.get("nullable") is True:
            # As OpenAPI 3.0 says that a value may be null.
            found |= {"null"}
        return found or ANY

    def _union(self, schemas: Iterable[Any], depth: int) -> Kinds:
        found: Kinds = frozenset()
        for schema in schemas:
            found |= self.kinds(schema, depth + 1)
            if found == ANY:
                break
        return found

    def _referred(self, reference: str, depth: int) -> Kinds:
        if reference not in self._known:
            self._known[reference] = ANY  # where it refers to itself
            self._known[reference] = self.kinds(self._target(reference), depth + 1)
        return self._known[reference]

    def _target(self, reference: str) -> Any:
        if not reference.startswith("#/"):
            return None
        target: Any = self._root
        for part in reference[2:].split("/"):
            if not isinstance(target, Mapping):
                return None
            target = target.get(part.replace("~1", "/").replace("~0", "~"))
        return target


def _named(names: list[Any]) -> Kinds:
    known = {name for name in names if isinstance(name, str) and name in ANY}
    if "number" in known:
        known.add("integer")
    return frozenset(known) or ANY


def _of_values(values: list[Any]) -> Kinds:
    # There may be a million of them.
    types = set(map(type, values))
    found: Kinds = frozenset().union(*map(_of_type, types))
    if float in types and "integer" not in found and any(map(_is_whole, values)):
        found |= {"integer"}
    return found or ANY


def _of_type(of_value: type) -> Kinds:
    """Return the kinds of all values of a type of Python's; of no type of JSON any."""
    for known, kinds in _KINDS_OF_TYPES:
        if issubclass(of_value, known):
            return kinds
    return ANY


def _is_whole(value: Any) -> bool:
    return type(value) is float and value.is_integer()
