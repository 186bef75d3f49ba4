"""Any schema and its rewriting have the same instances, and so has the grammar."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from src.engine.grammar.compiled import GrammarError
from src.engine.grammar.schemas import Refusal, rewrite
from tests.support.instances import accepts, is_valid, matcher_of

NAMES = st.sampled_from(["a", "b", "c", "kind"])
WORDS = st.sampled_from(["", "x", "xy", "y", "cat", "a", "b"])
# No fractions: of those schemas say less than they could.
SCALARS = st.none() | st.booleans() | st.integers(-2, 4) | WORDS
INSTANCES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
LEAVES = (
    st.builds(lambda value: {"const": value}, SCALARS)
    | st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=3))
    | st.builds(lambda type_: {"type": type_}, TYPES)
    | st.builds(lambda n: {"type": "integer", "minimum": n}, st.integers(-2, 4))
    | st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 2))
    | st.sampled_from([True, {}, {"type": "string", "format": "of-our-own"}])
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(NAMES, max_size=2, unique=True)
    return st.fixed_dictionaries(
        {"properties": st.dictionaries(NAMES, inner, max_size=3)},
        optional={
            "type": st.just("object"),
            "required": names,
            "additionalProperties": st.sampled_from([True, False, {"type": "integer"}]),
            "patternProperties": st.dictionaries(
                st.sampled_from(["^a$", "^(a|b)$", "^kin", "^[bc]$"]), inner, max_size=1
            ),
            "propertyNames": st.sampled_from(
                [
                    *({"pattern": "^[ab]"}, {"maxLength": 1}, {"enum": ["a", "kind"]}),
                    *({"type": "string"}, {"not": {"const": "b"}}),
                ]
            ),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 3),
            "dependentRequired": st.dictionaries(NAMES, names, max_size=1),
            "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1),
        },
    )


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    items = st.lists(st.sampled_from(["x", "y", 1]), min_size=1, max_size=3)
    return st.builds(
        lambda values, most, unique: {
            "type": "array",
            "items": {"enum": values},
            "maxItems": most,
            "uniqueItems": unique,
        },
        items,
        st.integers(0, 3),
        st.booleans(),
    ) | st.builds(lambda schema: {"type": "array", "items": schema, "maxItems": 2}, inner)


def choices(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    some = st.lists(inner, min_size=1, max_size=3)
    return (
        st.builds(lambda branches: {"oneOf": branches}, some)
        | st.builds(lambda branches: {"anyOf": branches}, some)
        | st.builds(lambda parts: {"allOf": parts}, some)
        | st.builds(lambda schema: {"not": schema}, inner)
        | st.fixed_dictionaries({"if": inner}, optional={"then": inner, "else": inner})
    )


SCHEMAS = st.recursive(
    LEAVES, lambda inner: objects(inner) | arrays(inner) | choices(inner), max_leaves=6
)
# The same, and with something to say beside a choice.
WHOLE = (
    objects(LEAVES)
    | objects(SCHEMAS)
    | choices(objects(LEAVES))
    | st.builds(lambda one, other: {**one, **other}, objects(LEAVES), choices(objects(LEAVES)))
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=WHOLE, instances=st.lists(INSTANCES, min_size=8, max_size=8))
def test_a_rewritten_schema_has_the_same_instances(schema: Any, instances: list[Any]) -> None:
    given = copy.deepcopy(schema)
    try:
        rewritten = rewrite(schema)
    except Refusal:
        assume(False)
    assert schema == given
    for instance in instances:
        assert is_valid(schema, instance) == is_valid(rewritten, instance), (rewritten, instance)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=WHOLE, instances=st.lists(INSTANCES, min_size=8, max_size=8))
def test_a_grammar_takes_what_is_valid_and_nothing_else(schema: Any, instances: list[Any]) -> None:
    try:
        matcher = matcher_of(schema)
    except GrammarError:
        assume(False)
    for instance in instances:
        assert accepts(matcher, instance) == is_valid(schema, instance), instance
