"""The negation of a schema, where it can be expressed exactly."""

from __future__ import annotations

import itertools
from collections.abc import Set
from typing import Any, Final, NamedTuple

from src.engine.grammar.schemas.knowledge import Knowledge
from src.engine.grammar.schemas.terms import (
    ANNOTATIONS,
    FORMATS,
    FRACTION,
    MAX_DEPTH,
    TYPES,
    InexpressibleError,
    Schema,
    all_of,
    any_of,
    at,
    key_of,
    type_of,
    typed,
    types_named,
)
from src.engine.grammar.schemas.words import pattern_of_others

_NUMBERS: Final = frozenset({"integer", FRACTION})
# Keywords whose negation cannot be expressed, and the type that they apply to.
_SPEAK_OF: Final = {
    **dict.fromkeys(("pattern", "contentSchema"), "string"),
    **dict.fromkeys(
        ("items", "additionalItems", "contains", "uniqueItems", "unevaluatedItems"), "array"
    ),
    **dict.fromkeys(
        (
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "unevaluatedProperties",
        ),
        "object",
    ),
}
# Keyword -> (type, keyword of the negated bound, difference of the negated bound).
_BOUNDS: Final = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


class Scope(NamedTuple):
    """The values among which a negation is sought.

    Attributes
    ----------
    types
        Their types.
    names
        The names of their properties; ``None`` if these are not limited.
    context
        A schema that all of them satisfy.
    """

    types: frozenset[str] = TYPES
    names: frozenset[str] | None = None
    context: Schema = True


class Complement:
    """Negates schemas of one document that have been rewritten already.

    Parameters
    ----------
    root
        The document, to resolve references.
    unfinished
        Identities of schemas that are still being rewritten, and so are incomplete.
    """

    def __init__(self, root: Schema, knowledge: Knowledge, unfinished: Set[int] = frozenset()):
        self._root = root
        self._unfinished = unfinished
        self._knowledge = knowledge

    def within(self, context: Schema, schema: Schema) -> list[Schema]:
        """Alternatives that together hold exactly where ``context`` holds and ``schema`` does not.

        Raises
        ------
        InexpressibleError
            The negation cannot be expressed.
        """
        scope = self._scope(context)
        # The schema may have no instances of some types. For those no details are needed.
        free = {
            name
            for group in (*({name} for name in scope.types - _NUMBERS), scope.types & _NUMBERS)
            if group and self._knowledge.are_disjoint(all_of([context, typed(group)]), schema)
            for name in group
        }
        if not free:
            return self.of(schema, scope)
        rest = scope.types - free
        inner = scope._replace(types=rest, context=all_of([context, typed(rest)]))
        return [typed(free), *(self.of(schema, inner) if rest else [])]

    def _scope(self, context: Schema) -> Scope:
        known = self._knowledge
        return Scope(known.types(context), known.names(context), context)

    def of(self, schema: Schema, scope: Scope, depth: int = 0) -> list[Schema]:
        """Alternatives that together hold exactly where, within the scope, ``schema`` does not.

        Raises
        ------
        InexpressibleError
            The negation cannot be expressed.
        """
        if isinstance(schema, bool):
            return [] if schema else [True]
        if depth > MAX_DEPTH or id(schema) in self._unfinished:
            raise InexpressibleError("it is nested too deep, or within itself")
        options: list[Schema] = []
        for key, value in schema.items():
            options += self._without(schema, key, value, scope, depth)
        return [option for option in options if not self._is_outside(option, scope)]

    def _is_outside(self, option: Schema, scope: Scope) -> bool:
        return self._knowledge.are_disjoint(option, scope.context)

    def _without(
        self, schema: dict[str, Any], key: str, value: Any, scope: Scope, depth: int
    ) -> list[Schema]:
        """Alternatives for the values that one keyword excludes."""
        if key in ANNOTATIONS or (key == "format" and value not in FORMATS):
            return []
        match key:
            case "type":
                others = scope.types - types_named(value)
                return [typed(others)] if others else []
            case "const" | "enum":
                return self._without_values([value] if key == "const" else value, scope)
            case "$ref":
                return self.of(at(self._root, value), scope, depth + 1)
            case "allOf":
                return [option for part in value for option in self.of(part, scope, depth + 1)]
            case "anyOf":
                return [all_of([any_of(self.of(part, scope, depth + 1)) for part in value])]
            case "multipleOf" if scope.types.isdisjoint(_NUMBERS):
                return []
            case "format" if "string" not in scope.types:
                return []
        if key in _BOUNDS:
            return _beyond_bound(key, value)
        if key in _SPEAK_OF and _SPEAK_OF[key] not in scope.types:
            return []
        if "array" not in scope.types and key == "prefixItems":
            return []
        if key in ("required", "properties", "additionalProperties"):
            return self._without_properties(schema, key, value, scope, depth)
        raise InexpressibleError(f"the opposite of {key!r} cannot be said")

    def _without_values(self, values: list[Any], scope: Scope) -> list[Schema]:
        known = self._knowledge.values(scope.context)
        if known is None:
            return _all_but(values, scope.types)
        left_out = {key_of(value) for value in values}
        return [{"enum": [value for value in known if key_of(value) not in left_out]}]

    def _without_properties(
        self, schema: dict[str, Any], key: str, value: Any, scope: Scope, depth: int
    ) -> list[Schema]:
        if "object" not in scope.types:
            return []
        if key == "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        if key == "properties":
            found = {
                name: any_of(self.of(given, self._inner(scope, name), depth + 1))
                for name, given in value.items()
                if scope.names is None or name in scope.names
            }
            return [_having(name, option) for name, option in found.items() if option is not False]
        if value is True or value == {}:
            return []
        if scope.names is None or schema.get("patternProperties"):
            raise InexpressibleError("the opposite of 'additionalProperties' cannot be said")
        others = sorted(scope.names - set(schema.get("properties") or ()))
        found = {
            name: any_of(self.of(value, self._inner(scope, name), depth + 1)) for name in others
        }
        return [_having(name, option) for name, option in found.items() if option is not False]

    def _inner(self, scope: Scope, name: str) -> Scope:
        return self._scope(self._knowledge.property(scope.context, name))


def _having(name: str, value: Schema) -> Schema:
    return {"type": "object", "properties": {name: value}, "required": [name]}


def _beyond_bound(key: str, value: Any) -> list[Schema]:
    type_, opposite, difference = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InexpressibleError(f"the opposite of {key!r} cannot be said")
    if value + difference < 0 and type_ != "number":
        return []
    return [{"type": type_, opposite: value + difference}]


def _all_but(values: list[Any], types: frozenset[str]) -> list[Schema]:
    """Alternatives for all values of these types except ``values``."""
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault("number" if type_of(value) in _NUMBERS else type_of(value), []).append(
            value
        )
    mentioned = set(by_type) | (_NUMBERS if "number" in by_type else set())
    others = types - mentioned
    options: list[Schema] = [typed(others)] if others else []
    for type_, given in by_type.items():
        if type_ in ("array", "object") and type_ in types:
            raise InexpressibleError(f"all values but one {type_} cannot be said")
        if type_ == "string":
            options.append({"type": "string", "pattern": pattern_of_others(given)})
        elif type_ == "boolean":
            options += [{"const": flag} for flag in (True, False) if flag not in given]
        elif type_ == "number":
            options += _without_numbers(sorted(set(given)), types)
    return options


def _without_numbers(numbers: list[Any], types: frozenset[str]) -> list[Schema]:
    name = "number" if FRACTION in types else "integer"
    options: list[Schema] = [{"type": name, "exclusiveMaximum": numbers[0]}]
    for low, high in itertools.pairwise(numbers):
        options.append({"type": name, "exclusiveMinimum": low, "exclusiveMaximum": high})
    options.append({"type": name, "exclusiveMinimum": numbers[-1]})
    # The library refuses ranges without any integer.
    return [option for option in options if name == "number" or not _is_empty(option)]


def _is_empty(option: Schema) -> bool:
    assert isinstance(option, dict)
    low, high = option.get("exclusiveMinimum"), option.get("exclusiveMaximum")
    return low is not None and high is not None and high - low <= 1
