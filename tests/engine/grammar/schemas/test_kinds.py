"""Each kind of rewriting, with valid and invalid instances, and what stays refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from src.engine.grammar import trial
from src.engine.grammar.compiled import GrammarError
from src.engine.grammar.schemas import prepare
from src.engine.grammar.schemas.patterns import are_disjoint, words_of
from src.engine.grammar.schemas.words import pattern_of_others
from tests.support.instances import accepts, is_valid, matcher_of


def closed(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **others,
    }


def tagged(name: str, value: Any, *, default: bool = False, **others: Any) -> dict[str, Any]:
    tag = {"const": name, "type": "string", **({"default": name} if default else {})}
    required = ["value"] if default else ["kind", "value"]
    return {
        "type": "object",
        "properties": {"kind": tag, "value": value},
        "required": required,
        **others,
    }


CAT, DOG = tagged("cat", {"type": "string"}), tagged("dog", {"type": "integer"})
LISTED = {"type": "array", "items": {"type": "string"}}
ABC = {name: {"type": "integer"} for name in "abc"}
SOME = [{}, {"a": 1}, {"b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, {"d": 1}, 5, {"a": "x"}]
MORE = [
    *SOME,
    *({"a": 1, "d": 1}, {"d": 1, "e": 1}, {"a": 1, "d": 1, "e": 1}, {"b": 1, "c": 1, "d": 1}),
    *({"a": 1, "b": 1, "d": 1}, {"b": 1, "c": 1}),
]

# Schema, and instances of which jsonschema says which are valid: some are, and some are not.
KINDS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "oneOf, a tag": (
        {"oneOf": [CAT, DOG]},
        [
            *({"kind": "cat", "value": "x"}, {"kind": "dog", "value": 1}, {"value": 1}),
            *({"kind": "cat", "value": 1}, {"kind": "cow", "value": 1}, None),
        ],
    ),
    "oneOf, a tag behind references, with a discriminator": (
        {
            "$defs": {"Cat": CAT, "Dog": DOG},
            "properties": {
                "pet": {
                    "discriminator": {
                        "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                        "propertyName": "kind",
                    },
                    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                }
            },
            "required": ["pet"],
            "type": "object",
        },
        [
            *({"pet": {"kind": "dog", "value": 3}}, {"pet": {"kind": "dog", "value": "x"}}),
            *({"pet": {"value": 3}}, {}),
        ],
    ),
    "oneOf, a tag with a default": (
        {
            "oneOf": [
                tagged("cat", LISTED, default=True),
                tagged("dog", LISTED, default=True),
            ]
        },
        [
            *({"kind": "cat", "value": ["x"]}, {"kind": "dog", "value": []}),
            *({"kind": "cow", "value": []}, {"value": []}, {"kind": "dog", "value": [1]}),
        ],
    ),
    "oneOf, by what is required": (
        {**closed(ABC), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        SOME,
    ),
    "oneOf, types": ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["x", 1, None, []]),
    "oneOf, that overlap": (
        {"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 5}]},
        [1, 3, 4, 5, 6, "x"],
    ),
    **{
        f"oneOf, {low} and {high} of a {kind} that touch": (
            {"type": kind, "oneOf": [{high: 3}, {low: 3}]},
            [2, 3, 4, *([] if kind == "integer" else [2.5, 3.5]), "x"],
        )
        for kind in ("integer", "number")
        for low in ("minimum", "exclusiveMinimum")
        for high in ("maximum", "exclusiveMaximum")
    },
    **{
        f"oneOf, {low} and {high} that overlap": (
            {"type": "number", "oneOf": [{high: 5}, {low: 3}]},
            [2, 3, 4, 5, 6, 3.5, 5.5, "x"],
        )
        for low in ("minimum", "exclusiveMinimum")
        for high in ("maximum", "exclusiveMaximum")
    },
    "oneOf, lengths that touch": (
        {"type": "string", "oneOf": [{"maxLength": 2}, {"minLength": 2}]},
        ["x", "xy", "xyz", 1],
    ),
    "oneOf, numbers of items that touch": (
        {
            "type": "array",
            "items": {"type": "integer"},
            "oneOf": [{"maxItems": 1}, {"minItems": 1}],
        },
        [[], [1], [1, 2], 1],
    ),
    "oneOf, one value in both lists": (
        {"oneOf": [{"enum": [1, 2, "x"]}, {"enum": [2, 3]}]},
        [1, 2, 3, "x", "y"],
    ),
    "oneOf, properties that touch": (
        {
            "oneOf": [
                closed({"a": {"type": "integer", "maximum": 3}}, required=["a"]),
                closed({"a": {"type": "integer", "minimum": 3}}, required=["a"]),
            ]
        },
        [{"a": 2}, {"a": 3}, {"a": 4}, {}],
    ),
    "oneOf, patterns": (
        {"oneOf": [{"type": "string", "pattern": p} for p in ("^https?://.", r"^\./.")]},
        ["http://a", "https://a", "./a", "a", 1],
    ),
    "unknown formats": (
        {"type": "string", "format": "mongoId", "maxLength": 3},
        ["abc", "abcd", 1],
    ),
    "propertyNames, strings": (
        {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 1},
        [{}, {"x": 1}, {"x": 1, "y": 2}],
    ),
    "propertyNames, a pattern": (
        {"type": "object", "properties": {"a": {}, "b1": {}}, "propertyNames": {"pattern": "^a"}},
        [{"a": 1}, {"ab": 1}, {"b1": 1}, {"b": 1}, {}],
    ),
    "propertyNames, a length": (
        {"type": "object", "propertyNames": {"pattern": r"^[\w]+$", "maxLength": 2}},
        [{"a": 1}, {"ab": 1}, {"abc": 1}, {"": 1}],
    ),
    "propertyNames, a list": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": ABC["a"]},
        [{"a": 1}, {"b": 1}, {"c": 1}, {"a": "x"}],
    ),
    "propertyNames, all but some": (
        {"type": "object", "propertyNames": {"not": {"enum": ["a", "b"]}}},
        [{"c": 1}, {"b": 1}, {}],
    ),
    "uniqueItems, false": ({**LISTED, "uniqueItems": False}, [["x", "x"], [1]]),
    "uniqueItems, of an enum": (
        {"type": "array", "items": {"enum": ["x", "y", 1]}, "uniqueItems": True, "minItems": 1},
        [["x"], ["y", "x"], [1, "y", "x"], [], ["x", "x"], ["z"]],
    ),
    "dependentRequired": ({**closed(ABC), "dependentRequired": {"a": ["b"]}}, SOME),
    "dependentSchemas": ({**closed(ABC), "dependentSchemas": {"a": {"required": ["b"]}}}, SOME),
    "dependencies": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            **closed(ABC),
            "dependencies": {"a": ["b"], "b": {"required": ["a"]}},
        },
        SOME,
    ),
    "not, required": ({**closed(ABC), "not": {"required": ["a"]}}, SOME),
    "not, values": ({"type": "string", "not": {"enum": ["x", "xy"]}}, ["x", "xy", "xyz", "", "y"]),
    "not, a type": ({"not": {"type": ["string", "object"]}}, [1, None, "x", {}]),
    "not, a tag": (
        {**closed({"kind": {"type": "string"}}), "not": {"properties": {"kind": {"const": "x"}}}},
        [{"kind": "y"}, {"kind": "x"}, {}],
    ),
    "if, then, else": (
        {
            **closed({"kind": {"enum": ["x", "y"]}, **ABC}, required=["kind"]),
            "if": {"properties": {"kind": {"const": "x"}}},
            "then": {"required": ["a"]},
            "else": {"required": ["b"]},
        },
        [{"kind": "x", "a": 1}, {"kind": "x", "b": 1}, {"kind": "y", "b": 1}, {"kind": "y"}, {}],
    ),
    "minProperties, closed": ({**closed(ABC), "minProperties": 2}, SOME),
    "maxProperties, closed": ({**closed(ABC), "maxProperties": 1}, SOME),
    "both, closed": ({**closed(ABC), "minProperties": 1, "maxProperties": 2}, SOME),
    "minProperties, open": ({"type": "object", "properties": ABC, "minProperties": 1}, SOME),
    "maxProperties, open": ({"type": "object", "properties": ABC, "maxProperties": 1}, SOME),
    **{
        f"{least} to {most} properties, {how}, some required": (
            {
                "type": "object",
                "properties": ABC,
                "required": ["a"],
                **({} if least is None else {"minProperties": least}),
                **({} if most is None else {"maxProperties": most}),
                **({"additionalProperties": False} if how == "closed" else {}),
            },
            MORE,
        )
        for how in ("open", "closed")
        for least, most in ((2, None), (3, None), (None, 1), (None, 2), (2, 2), (1, 2))
    },
    "unevaluatedProperties": (
        {"type": "object", "properties": ABC, "unevaluatedProperties": False},
        SOME,
    ),
    "a pattern that is a declared name": (
        closed(
            {"a": {"type": "integer"}},
            required=["a"],
            patternProperties={"^a$": {"minimum": 3}},
        ),
        [{"a": 3}, {"a": 2}, {"a": 3, "b": 1}, {}],
    ),
    "a reference into what is rewritten": (
        {
            "type": "object",
            "properties": {
                "a": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
                "b": {"$ref": "#/properties/a/oneOf/1"},
            },
            "required": ["a", "b"],
        },
        [{"a": "x", "b": 1}, {"a": 1, "b": "x"}],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_enforced_exactly(kind: str) -> None:
    schema, instances = KINDS[kind]
    valid = [is_valid(schema, instance) for instance in instances]
    assert set(valid) == {True, False}
    matcher = matcher_of(schema)
    assert [accepts(matcher, instance) for instance in instances] == valid


@pytest.mark.parametrize(
    "patterns",
    [{"^a$": {"type": ["integer", "null"]}}, {"^(?:a|b)$": {}}, {"^.*": {"type": "null"}}],
)
def test_no_pattern_leads_into_a_dead_end(patterns: dict[str, Any]) -> None:
    """A comma is offered only where a name may follow."""
    schema = {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "required": ["a", "b"],
        "patternProperties": patterns,
    }
    for others in ({}, {"additionalProperties": False}):
        matcher = matcher_of({**schema, **others})
        for text in ('{"a": null, "b": null', ', "zz": null'):
            taken = matcher.try_consume_tokens(list(text.encode()))
            matcher.compute_bitmask()
            assert not matcher.is_error()
        assert taken in (0, len(text))


def test_no_name_is_begun_where_none_is_left() -> None:
    matcher = matcher_of({"type": "object", "patternProperties": {".*": False}})
    assert matcher.try_consume_tokens(list(b'{"')) == 1
    assert matcher.try_consume_tokens(list(b"}")) == 1


REFUSED = {
    "/properties/tags/uniqueItems": {
        "properties": {"tags": {"type": "array", "items": {}, "uniqueItems": True}}
    },
    "/properties/a/oneOf": {"properties": {"a": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}}},
    "/$defs/x/contains": {"$ref": "#/$defs/x", "$defs": {"x": {"contains": {"const": 1}}}},
    "/items/not": {"items": {"not": {"pattern": "a"}}},
    "/properties/n/anyOf/1": {
        "properties": {"n": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(?=x)"}]}}
    },
}


@pytest.mark.parametrize("path", REFUSED)
def test_a_refusal_names_the_place_and_the_reason(path: str) -> None:
    with pytest.raises(GrammarError, match=f"the schema at {path.replace('$', '.')}: ") as raised:
        matcher_of(REFUSED[path])
    assert "option" not in str(raised.value)
    assert "%json" not in str(raised.value)


def test_what_unfolds_too_far_is_refused_and_in_a_few_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema, _ = KINDS["both, closed"]
    with monkeypatch.context() as patch:
        patch.setattr(trial, "_MAX_CHARACTERS", 2 * len(json.dumps(schema)))
        with pytest.raises(GrammarError, match="too large once they are unfolded"):
            matcher_of(schema)
    matcher_of(schema)
    name = "x" * 1000
    with pytest.raises(GrammarError, match=r"the schema at /properties/x+\.\.\.: ") as raised:
        matcher_of({"properties": {name: {"contains": {"const": name}}}})
    assert len(str(raised.value)) < 350


def test_what_cannot_be_enforced_is_left_out_where_that_may_be() -> None:
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "look": {"type": "string", "pattern": "(?=x)x"},
            "n": {"type": "integer"},
        },
        "required": ["tags", "look", "n"],
    }
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    text = f"start: %json {json.dumps({**schema, 'x-guidance': {**options, 'lenient': True}})}"
    rewritten = prepare(text)
    assert [note.split(": ")[0] for note in rewritten.dropped] == [
        "the schema at /properties/tags/uniqueItems",
        "the schema at /properties/look",
    ]
    assert '"uniqueItems"' not in rewritten.text
    assert '{"type": "integer"}' in rewritten.text


def test_schemas_are_found_in_grammars_and_not_in_their_texts() -> None:
    schema = '{"uniqueItems": false, "type": "array"}'
    text = f'start: "%json {{}}" /%json {{1}}/ thing // %json {{}}\nthing: %json {schema}\n'
    assert prepare(text).text == text.replace(schema, '{"type": "array"}')
    assert prepare("start: %json {nothing").text == "start: %json {nothing"


def test_the_words_of_patterns() -> None:
    assert words_of("^(a|b)c?$") == ["ac", "a", "bc", "b"]
    assert words_of(r"^x\.[0-2]$") == ["x.0", "x.1", "x.2"]
    for pattern in ("a", "^a", "^a*$", "^a|b$", r"^\d$", "^[^a]$", "^(?!a)b$", r"^a\$", "^(a$"):
        assert words_of(pattern) is None
    assert are_disjoint(r"\.js$", r"\.(css|html)$")
    assert not are_disjoint(r"\.js$", r"s$")
    assert not are_disjoint("^ab?", "^ac")
    assert not are_disjoint("^a|b", "^c")


@pytest.mark.parametrize("words", [[""], ["a"], ["a", "ab"], ["x/y", "x ", "]-^", "é"], ["", "a"]])
def test_all_strings_but_some(words: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern_of_others(words)}
    matcher = matcher_of(schema)
    for text in ["", "a", "ab", "abc", "b", "x", "x/", "x/y", "x ", "x\\", "]-^", '"', "é", "è"]:
        assert accepts(matcher, text) == is_valid(schema, text) == (text not in words)
