"""Random JSON schemas with short instances, so that a random model completes them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "name", "größe", "x y", 'q"t', "", "0", "back\\slash", "🙂"])
VALUES = st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4)
PATTERNS = ["^[a-c]{1,4}$", "^x+y?$".replace("+", "{1,3}"), "^[0-9]{2}-[0-9]{2}$", "^(ja|nein)$"]


def _strings() -> st.SearchStrategy[dict[str, Any]]:
    lengths = st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}
    )
    return (
        lengths
        | st.sampled_from([{"type": "string", "pattern": pattern} for pattern in PATTERNS])
        | st.sampled_from([{"type": "string", "format": form} for form in ("date", "time", "uuid")])
    )


def _numbers() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-1000, 1000), st.integers(1, 2000))
    return bounds.map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
    ) | bounds.map(
        lambda pair: {"type": "integer", "exclusiveMinimum": pair[0], "maximum": sum(pair)}
    )


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def build(drawn: tuple[dict[str, dict[str, Any]], int]) -> dict[str, Any]:
        properties, bits = drawn
        required = [name for index, name in enumerate(properties) if bits >> index & 1]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return st.tuples(st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 7)).map(build)


def _arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    sizes = st.tuples(st.integers(0, 2), st.integers(0, 2))
    plain = st.tuples(inner, sizes).map(
        lambda drawn: {
            "type": "array",
            "items": drawn[0],
            "minItems": drawn[1][0],
            "maxItems": sum(drawn[1]),
        }
    )
    places = st.lists(inner, min_size=1, max_size=3).map(
        lambda prefix: {
            "type": "array",
            "prefixItems": prefix,
            "items": False,
            "minItems": len(prefix),
        }
    )
    return plain | places


LEAVES = (
    _strings()
    | _numbers()
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])
    | st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values})
    | VALUES.map(lambda value: {"const": value})
)

_TREES = st.recursive(
    LEAVES,
    lambda inner: (
        _objects(inner)
        | _arrays(inner)
        | st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    ),
    max_leaves=5,
)
SCHEMAS = _TREES | _TREES.map(lambda tree: {"$ref": "#/$defs/it", "$defs": {"it": tree}})
