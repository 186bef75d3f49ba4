"""Keywords of objects: names, numbers and dependencies of properties."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from src.engine.grammar.schemas.patterns import matches, words_of
from src.engine.grammar.schemas.terms import (
    ANNOTATIONS,
    MAX_ALTERNATIVES,
    TYPES,
    InexpressibleError,
    Refusal,
    Schema,
    all_of,
    any_of,
    pointer,
    typed,
    types_named,
)

# A pattern for any number of characters of one set.
_OF_CHARACTERS: Final = re.compile(r"\^(\[(?:[^\[\]\\]|\\[\w\-.])+\]|\\w)([+*])\$")


_NO_OBJECT: Final = typed(TYPES - {"object"})


def dependencies(schema: Mapping[str, Any]) -> list[Schema]:
    """Schemas for ``dependentRequired``, ``dependentSchemas`` and the older ``dependencies``."""
    found: list[Schema] = []
    required = set(schema.get("required") or ())
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, wanted in (schema.get(keyword) or {}).items():
            present: Schema
            if isinstance(wanted, list):
                present = {"required": [name, *(other for other in wanted if other != name)]}
                wanted_at_all = set(wanted) - required != set()
            else:
                present = all_of([{"required": [name]}, wanted])
                wanted_at_all = wanted not in (True, {})
            if wanted_at_all:
                # The first alternative also holds for values that are not objects.
                found.append(any_of([{"properties": {name: False}}, present]))
    if math.prod(2 for _ in found) > MAX_ALTERNATIVES:
        raise InexpressibleError("properties depend on one another in too many ways")
    return found


def limit_names(schema: dict[str, Any], names: Schema, path: str) -> dict[str, Any]:
    """Enforce ``names``, the value of ``propertyNames``, by other keywords of ``schema``.

    Raises
    ------
    Refusal
        It is something else than a pattern, a length or a list of names.
    """
    where = pointer(path, "propertyNames")
    if names is False:
        return {**schema, "maxProperties": 0}
    given = {} if names is True else {k: v for k, v in names.items() if k not in ANNOTATIONS}
    if "string" not in types_named(given.pop("type", "string")):
        raise Refusal(where, "a name is a string")
    if not given:
        return schema
    declared: dict[str, Schema] = dict(schema.get("properties") or {})
    excluded = _excluded(given)
    if excluded is not None:
        return {**schema, "properties": {**declared, **dict.fromkeys(excluded, False)}}
    if schema.get("patternProperties"):
        raise Refusal(where, "it goes together with patternProperties")
    others = schema.get("additionalProperties", True)
    limited = {**schema, "additionalProperties": False}
    if len(given) == 1 and ("enum" in given or "const" in given):
        listed = given.get("enum", [given.get("const")])
        allowed = [name for name in listed if isinstance(name, str)]
        fits = {name: name in allowed for name in declared}
        if others is not False:
            declared |= {name: others for name in allowed if name not in declared}
    elif (pattern := _pattern(given)) is not None:
        fits = {name: matches(pattern, name) for name in declared}
        if others is not False:
            limited["patternProperties"] = {pattern: others}
    else:
        raise Refusal(where, "only a pattern, a length or a list of names is known")
    if declared:
        limited["properties"] = {n: v if fits.get(n, True) else False for n, v in declared.items()}
    return limited


def _excluded(names: Mapping[str, Any]) -> list[str] | None:
    """The forbidden names, if ``names`` only forbids a list of names."""
    negated = names.get("not") if len(names) == 1 else None
    if not isinstance(negated, dict) or len(negated) != 1:
        return None
    if "enum" in negated or "const" in negated:
        listed = negated.get("enum", [negated.get("const")])
        return [name for name in listed if isinstance(name, str)]
    return None


def _pattern(names: Mapping[str, Any]) -> str | None:
    """One pattern for names with a given pattern, length, or set of characters and length."""
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if names.keys() <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{least},{most}}}$"
    if names.keys() == {"pattern"}:
        return str(names["pattern"])
    if names.keys() <= {"minLength", "maxLength", "pattern"}:
        found = _OF_CHARACTERS.fullmatch(names["pattern"])
        if found is not None:
            least = max(least, 1 if found[2] == "+" else 0)
            return f"^{found[1]}{{{least},{most}}}$"
    return None


def settle_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace patterns that match only a few words by declared properties.

    The library removes declared names from a pattern. A pattern without any name left would be a
    dead end.
    """
    patterns: dict[str, Schema] = dict(schema.get("patternProperties") or {})
    properties: dict[str, Schema] = dict(schema.get("properties") or {})
    settled: dict[str, Schema] = {}
    for pattern, given in patterns.items():
        words = words_of(pattern)
        if words is None:
            settled[pattern] = given
            continue
        # The pattern's words become declared properties.
        for word in words:
            known = properties.get(word)
            properties[word] = given if known is None else all_of([known, given])
    if len(settled) == len(patterns):
        return schema
    result = {**schema, "properties": properties, "patternProperties": settled}
    if not settled:
        del result["patternProperties"]
    return result


def leave_no_empty_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Forbid ``additionalProperties`` if a pattern matches every name, so that none is left."""
    patterns = schema.get("patternProperties") or {}
    if any(_matches_all(pattern) for pattern in patterns):
        return {**schema, "additionalProperties": False}
    return schema


def _matches_all(pattern: str) -> bool:
    return pattern in ("", "^", "$", ".*", "^.*", ".*$", "^[\\s\\S]*$", "^(.*)", "(.*)", ".*?")


def count(schema: Mapping[str, Any], path: str) -> Schema | None:
    """A schema for ``minProperties`` and ``maxProperties``, if the library cannot enforce them.

    It cannot if some declared properties are optional. Then the alternatives list which of them
    are present. ``None``: the library can enforce them.

    Raises
    ------
    Refusal
        There are too many alternatives.
    """
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    required = list(dict.fromkeys(schema.get("required") or ()))
    properties = schema.get("properties") or {}
    optional = [n for n, v in properties.items() if n not in required and v is not False]
    least = max(0, least - len(required))
    most = None if most is None else most - len(required)
    if most is not None and (most < 0 or least > most):
        return _NO_OBJECT
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if not optional or (least == 0 and (most is None or (is_closed and most >= len(optional)))):
        return None
    keyword = pointer(path, "minProperties" if least else "maxProperties")
    if is_closed:
        options = _of_closed(optional, least, most)
    elif most is None:
        options = _at_least(optional, least, required, keyword)
    else:
        options = _of_open(optional, schema, required)
    if options is None:
        raise Refusal(keyword, "there are too many ways to choose among the properties")
    return any_of(options) if options else _NO_OBJECT


def _of_closed(optional: Sequence[str], least: int, most: int | None) -> list[Schema] | None:
    """Alternatives if only declared properties are allowed; ``None`` if there are too many."""
    if least > len(optional):
        return []
    most = len(optional) if most is None else min(most, len(optional))
    if most == len(optional):
        # ``least`` of them are required; all others are optional.
        if math.comb(len(optional), least) > MAX_ALTERNATIVES:
            return None
        return [{"required": list(some)} for some in itertools.combinations(optional, least)]
    ways = math.comb(len(optional), most) * math.comb(most, least)
    if ways > MAX_ALTERNATIVES:
        return None
    return [
        {
            "properties": {name: False for name in optional if name not in some},
            "required": list(needed),
        }
        for some in itertools.combinations(optional, most)
        for needed in itertools.combinations(some, least)
    ]


def _at_least(
    optional: Sequence[str], least: int, required: Sequence[str], keyword: str
) -> list[Schema] | None:
    """Alternatives for at least ``least`` of the optional and of undeclared properties."""
    if least > 1 and 2 ** len(optional) > MAX_ALTERNATIVES:
        return None
    if least == 1:
        # One optional property is present, or none of them and an undeclared one.
        others: Schema = {
            "properties": dict.fromkeys(optional, False),
            "minProperties": least + len(required),
        }
        return [*({"required": [name]} for name in optional), others]
    return [_exactly(some, optional, least + len(required), None) for some in _subsets(optional)]


def _of_open(
    optional: Sequence[str], schema: Mapping[str, Any], required: Sequence[str]
) -> list[Schema] | None:
    if 2 ** len(optional) > MAX_ALTERNATIVES:
        return None
    least, most = schema.get("minProperties", 0), schema["maxProperties"]
    return [
        _exactly(some, optional, least, most)
        for some in _subsets(optional)
        if len(some) + len(required) <= most
    ]


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [some for size in range(len(names) + 1) for some in itertools.combinations(names, size)]


def _exactly(
    some: Sequence[str], optional: Sequence[str], least: int, most: int | None
) -> dict[str, Any]:
    """Of ``optional`` exactly ``some`` are present; undeclared ones may be, up to ``most``."""
    schema: dict[str, Any] = {
        "properties": {name: False for name in optional if name not in some},
        "required": list(some),
        "minProperties": least,
    }
    if most is not None:
        schema["maxProperties"] = most
    return schema
