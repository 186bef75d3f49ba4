"""Facts that certainly hold for all instances of a schema, as far as they are easy to find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from src.engine.grammar.schemas.patterns import are_disjoint as patterns_are_disjoint
from src.engine.grammar.schemas.terms import (
    FRACTION,
    MAX_DEPTH,
    TYPES,
    InexpressibleError,
    Schema,
    at,
    key_of,
    type_of,
    types_named,
    values_of,
)

_NUMBERS: Final = frozenset({"integer", FRACTION})
# (type, keyword of its least length, keyword of its greatest length)
_LENGTHS: Final = (
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
)


class Knowledge:
    """Facts about the schemas of one document.

    Parameters
    ----------
    root
        The document, to resolve references.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root

    def parts(self, schema: Schema, depth: int = 0) -> Iterator[dict[str, Any] | bool]:
        """Schemas that all hold wherever ``schema`` holds."""
        yield schema
        if isinstance(schema, bool) or depth > MAX_DEPTH:
            return
        reference = schema.get("$ref")
        if isinstance(reference, str):
            try:
                target = at(self._root, reference)
            except InexpressibleError:
                target = True
            if isinstance(target, dict | bool):
                yield from self.parts(target, depth + 1)
        for part in schema.get("allOf") or ():
            yield from self.parts(part, depth + 1)

    def types(self, schema: Schema, depth: int = 0) -> frozenset[str]:
        """The types that an instance may have."""
        found = TYPES
        for part in self.parts(schema, depth):
            if part is False:
                return frozenset()
            if isinstance(part, dict):
                if "type" in part:
                    found &= types_named(part["type"])
                values = values_of(part)
                if values is not None:
                    found &= frozenset(map(type_of, values))
                for key in ("anyOf", "oneOf"):
                    if part.get(key) and depth <= MAX_DEPTH:
                        options = (self.types(option, depth + 4) for option in part[key])
                        found &= frozenset().union(*options)
        return found

    def values(self, schema: Schema) -> list[Any] | None:
        """A list that contains all possible instances, if the schema has one; ``None`` if not."""
        for part in self.parts(schema):
            values = values_of(part) if isinstance(part, dict) else None
            if values is not None:
                return values
        return None

    def names(self, schema: Schema) -> frozenset[str] | None:
        """The names that properties of an object may have; ``None`` if they are not limited."""
        found: frozenset[str] | None = None
        for part in self.parts(schema):
            if (
                isinstance(part, dict)
                and part.get("additionalProperties") is False
                and not part.get("patternProperties")
            ):
                given = frozenset(part.get("properties") or ())
                found = given if found is None else found & given
        return found

    def required(self, schema: Schema) -> frozenset[str]:
        """The properties that every object has."""
        return frozenset(
            name
            for part in self.parts(schema)
            if isinstance(part, dict)
            for name in part.get("required") or ()
        )

    def are_disjoint(self, one: Schema, other: Schema, depth: int = 0) -> bool:
        """Whether it is certain that no value is an instance of both."""
        if depth > 6:
            return False
        if self.types(one).isdisjoint(self.types(other)):
            return True
        ones, others = list(self.parts(one)), list(self.parts(other))
        types = self.types(one) & self.types(other)
        if any(self._clash(a, b, types) for a in ones for b in others):
            return True
        for parts, rest in ((ones, other), (others, one)):
            for part in parts:
                for key in ("anyOf", "oneOf"):
                    options = part.get(key) if isinstance(part, dict) else None
                    if options and all(
                        self.are_disjoint(option, rest, depth + 1) for option in options
                    ):
                        return True
        return self._objects_clash(one, other, depth)

    def _clash(self, one: Schema, other: Schema, types: frozenset[str]) -> bool:
        """Whether the two schemas' own keywords exclude each other, for these types."""
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        ones, others = values_of(one), values_of(other)
        if ones is not None and others is not None:
            return {key_of(v) for v in ones}.isdisjoint(key_of(v) for v in others)
        patterns = one.get("pattern"), other.get("pattern")
        if (
            types <= {"string"}
            and all(isinstance(pattern, str) for pattern in patterns)
            and patterns_are_disjoint(*map(str, patterns))
        ):
            return True
        for type_, least, most in _LENGTHS:
            if types <= {type_} and (
                _over(one, least, other, most) or _over(other, least, one, most)
            ):
                return True
        return types <= _NUMBERS and (_above(one, other) or _above(other, one))

    def _objects_clash(self, one: Schema, other: Schema, depth: int) -> bool:
        if not self.types(one) & self.types(other) <= {"object"}:
            return False
        return any(
            self.are_disjoint(self.property(one, name), self.property(other, name), depth + 1)
            for name in self.required(one) | self.required(other)
        )

    def property(self, schema: Schema, name: str) -> Schema:
        """A schema that certainly holds for the value of a property, if it is present."""
        found: list[Schema] = []
        for part in self.parts(schema):
            if not isinstance(part, dict):
                continue
            declared = part.get("properties") or {}
            if name in declared:
                found.append(declared[name])
            elif not part.get("patternProperties") and "additionalProperties" in part:
                found.append(part["additionalProperties"])
        return {"allOf": found} if found else True


def _over(one: dict[str, Any], least: str, other: dict[str, Any], most: str) -> bool:
    low, high = one.get(least), other.get(most)
    return isinstance(low, int) and isinstance(high, int) and low > high


def _above(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the lower bound of one is above the upper bound of the other."""
    for least in ("minimum", "exclusiveMinimum"):
        for most in ("maximum", "exclusiveMaximum"):
            low, high = one.get(least), other.get(most)
            if type(low) not in (int, float) or type(high) not in (int, float):
                continue
            assert low is not None
            if low > high or (low == high and "exclusive" in (least + most)):
                return True
    return False
