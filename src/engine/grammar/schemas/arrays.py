"""The keyword ``uniqueItems`` of arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, Final

from src.engine.grammar.schemas.knowledge import Knowledge
from src.engine.grammar.schemas.terms import (
    TYPES,
    Refusal,
    Schema,
    any_of,
    key_of,
    pointer,
    typed,
)

# Five values have 326 orderings of all or some of them.
_MAX_ARRAYS: Final = 400


def unique_items(
    schema: Mapping[str, Any], knowledge: Knowledge, path: str, *, has_prefixes: bool
) -> Schema:
    """Rewrite ``uniqueItems`` as a list of all allowed arrays, if items have few values.

    ``has_prefixes``: the schema's draft has ``prefixItems``, not a list of ``items``.

    Raises
    ------
    Refusal
        There are too many arrays, or the items' values are not listed.
    """
    most = schema.get("maxItems")
    if (most is not None and most <= 1) or "array" not in knowledge.types(dict(schema)):
        return True
    where = pointer(path, "uniqueItems")
    items = schema.get("items")
    values = None if not isinstance(items, dict) else _values(items, knowledge)
    if values is None or schema.get("prefixItems"):
        raise Refusal(where, "items cannot be kept apart unless an enum lists a few of them")
    least = schema.get("minItems", 0)
    most = len(values) if most is None else min(most, len(values))
    if sum(math.perm(len(values), size) for size in range(least, most + 1)) > _MAX_ARRAYS:
        raise Refusal(where, f"{len(values)} values can be put in too many orders")
    arrays: list[Schema] = [
        _array(chosen, has_prefixes=has_prefixes)
        for size in range(least, most + 1)
        for chosen in itertools.permutations(values, size)
    ]
    others = knowledge.types(dict(schema)) & (TYPES - {"array"})
    return any_of([*arrays, *([typed(others)] if others else [])])


def _values(items: dict[str, Any], knowledge: Knowledge) -> list[Any] | None:
    """The values that items may have, if their schema lists them."""
    values = knowledge.values(items)
    if values is not None:
        return list({key_of(value): value for value in values}.values())
    types = knowledge.types(items)
    if types <= {"boolean", "null"}:
        return [
            *((False, True) if "boolean" in types else ()),
            *((None,) if "null" in types else ()),
        ]
    return None


def _array(values: tuple[Any, ...], *, has_prefixes: bool) -> Schema:
    size = {"type": "array", "minItems": len(values), "maxItems": len(values)}
    if not values:
        return size
    places = [{"const": value} for value in values]
    return {**size, "prefixItems" if has_prefixes else "items": places}
