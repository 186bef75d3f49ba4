"""The form in which a grammar writes the calls of a request's functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from src.core.errors import InvalidRequestError
from src.text.tool_calls.syntax import Form, Members, Slot, Syntax
from src.text.tool_calls.syntaxes import SYNTAXES
from src.text.tool_calls.typed_values import TEXT, kinds_of_arguments

Tools: TypeAlias = Sequence[Mapping[str, Any]]
TokenOf: TypeAlias = Callable[[str], int | None]
"""Returns the id of the special token that a tag is, or None for one that is text."""

# As Python's json, and so most training data, writes it.
COMPACT: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

_BARE_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")
_BARE_KEY: Final = re.compile(r"[^<>\s]([^<>\r\n]*[^<>\s])?")
_NOTES: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
)
# Keywords of an object whose members can be written one by one, and of a string member.
_OBJECT_KEYS: Final = _NOTES | {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    "x-guidance",
}
_TO_DEFINITIONS: Final = ("#/$defs/", "#/definitions/")
_UNUSUAL_REFERENCES: Final = frozenset(
    {"$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "$recursiveAnchor"}
)
_TEXT_KEYS: Final = _NOTES | {"type", "enum", "const"}


class ForcedCalls(NamedTuple):
    """A form of a syntax, and the functions with the schemas of their arguments."""

    syntax: Syntax
    form: Form
    functions: list[tuple[str, dict[str, Any]]]


class Member(NamedTuple):
    """An argument that is written by itself.

    It is JSON that conforms to ``schema``, or one of ``texts``, or any text if both are ``None``.
    """

    name: str
    is_required: bool
    schema: dict[str, Any] | None = None
    texts: list[str] | None = None


def forced_calls(syntax: Syntax, tools: Tools, token_of: TokenOf) -> ForcedCalls:
    """Return the form of forced calls: the model's own, or JSON if that cannot express them.

    Raises
    ------
    InvalidRequestError
        A function's parameters are no object.
    """
    found = _calls_of(syntax, tools, token_of) or _calls_of(SYNTAXES["json"], tools, token_of)
    assert found is not None
    return found


def joining_calls(
    syntax: Syntax, tools: Tools, token_of: TokenOf, *, only_strict: bool = False
) -> ForcedCalls | None:
    """Return a form of calls that can stand beside other text; ``None`` if the syntax has none.

    With ``only_strict`` the other text is free, and functions that are not strict take any object.

    Raises
    ------
    InvalidRequestError
        A function's parameters are no object, and the grammar would enforce them.
    """
    found = _calls_of(syntax, tools, token_of, only_strict=only_strict)
    if found is None or not syntax.is_tagged(found.form):
        return None
    return None if only_strict and not found.form.joins_text else found


def members_of(schema: Mapping[str, Any]) -> Iterator[Member]:
    """Return the arguments of an object for which `_is_of_members` holds."""
    required = frozenset(schema.get("required", []))
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    kinds = kinds_of_arguments(schema)
    for name, its in schema["properties"].items():
        if kinds[name] != TEXT:
            # They may be large, and arguments are many.
            own = definitions if next(_references(its), None) is not None else {}
            whole = {**its, **own, "x-guidance": schema["x-guidance"]}
            yield Member(name, name in required, schema=whole)
        else:
            texts = [its["const"]] if "const" in its else its.get("enum")
            yield Member(name, name in required, texts=texts)


def _calls_of(
    syntax: Syntax, tools: Tools, token_of: TokenOf, *, only_strict: bool = False
) -> ForcedCalls | None:
    """Return the first form that can express all these functions."""
    for form in syntax.forms:
        if form.needs and token_of(form.needs) is None:
            continue
        # Arguments that are written one by one need a schema that names them.
        loosely = only_strict and form.members is None
        functions = [
            (
                tool["function"]["name"],
                {"type": "object", "x-guidance": COMPACT}
                if loosely and not tool["function"].get("strict")
                else _parameters(index, tool["function"]),
            )
            for index, tool in enumerate(tools)
        ]
        if all(_can_spell(form, name, schema) for name, schema in functions):
            return ForcedCalls(syntax, form, functions)
    return None


def _can_spell(form: Form, name: str, schema: Mapping[str, Any]) -> bool:
    if Slot.NAME in form.call and not _BARE_NAME.fullmatch(name):
        return False
    return form.members is None or _is_of_members(schema, form.members)


def _is_of_members(schema: Mapping[str, Any], members: Members) -> bool:
    """Whether each property can be written by itself, and the schema asks for nothing else.

    A schema that is malformed is not: what compiles it refuses it.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    if schema.get("additionalProperties") is not False or not _OBJECT_KEYS.issuperset(schema):
        return False
    if not all(isinstance(name, str) and name in properties for name in required):
        return False
    kinds = kinds_of_arguments(schema)
    for name, its in properties.items():
        if not _BARE_KEY.fullmatch(name) or not isinstance(its, Mapping):
            return False
        if kinds[name] == TEXT:
            if not _is_text(its, members):
                return False
        elif "string" in kinds[name]:
            return False
    return all(reference.startswith(_TO_DEFINITIONS) for reference in _references(schema))


def _is_text(schema: Mapping[str, Any], members: Members) -> bool:
    """Whether a string that conforms to this schema can be told from its end."""
    if not _TEXT_KEYS.issuperset(schema) or schema.get("type", "string") != "string":
        return False
    texts = schema.get("enum", [])
    if not isinstance(texts, list):
        return False
    return all(
        isinstance(text, str) and members.closing not in text and text == text.strip()
        for text in (*texts, schema.get("const", ""))
    )


def _references(schema: Any) -> Iterator[str]:
    """What a schema refers to; an empty text for a reference of an unusual kind."""
    left = [schema]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, Mapping):
            left += item.values()
            yield from (str(item[key]) for key in item if key == "$ref")
            yield from ("" for key in item if key in _UNUSUAL_REFERENCES)


def _parameters(index: int, function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: an object, of the properties that it names alone.

    Functions are called with what they declare, so others are left out unless they are provided
    for by ``additionalProperties``.
    """
    schema = function.get("parameters") or {"properties": {}}
    if schema.get("type", "object") != "object":
        where = f"tools[{index}].function.parameters"
        raise InvalidRequestError(f"{where} must describe an object", param=where)
    closed = {"additionalProperties": False} if "properties" in schema else {}
    # Of a function that is not strict, what cannot be enforced is left out.
    options = COMPACT if function.get("strict") else {**COMPACT, "lenient": True}
    return {"type": "object", **closed, **schema, "x-guidance": options}
