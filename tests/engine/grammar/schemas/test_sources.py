"""Schemas as the libraries write them that most clients have them from."""

from __future__ import annotations

import datetime
import enum
from typing import Annotated, Any, Literal

import pydantic
import pytest

from tests.support.instances import accepts, is_valid, matcher_of


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = pydantic.Field(ge=1, le=9)


class Dog(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["dog"]
    tricks: list[str] = pydantic.Field(default_factory=list, max_length=2)


class Owner(pydantic.BaseModel):
    """Every form that pydantic has for a field."""

    name: str
    born: datetime.date | None = None
    color: Color = Color.RED
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    other: Cat | Dog | None = None
    pair: tuple[int, str] | None = None
    scores: dict[str, float] = {}
    secret: pydantic.SecretStr | None = None
    friends: list[Owner] = []


OWNERS: list[Any] = [
    {"name": "x", "pet": {"kind": "cat", "lives": 9}},
    {"name": "x", "pet": {"kind": "cat", "lives": 10}},
    {"name": "x", "pet": {"kind": "dog", "tricks": ["sit"]}},
    {"name": "x", "pet": {"kind": "dog", "lives": 9}},
    {"name": "x", "pet": {"kind": "cow"}},
    {"name": "x", "born": "2026-02-01", "color": "blue", "pet": {"kind": "dog"}},
    {"name": "x", "color": "green", "pet": {"kind": "dog"}},
    {"name": "x", "pet": {"kind": "dog"}, "pair": [1, "a"]},
    {"name": "x", "pet": {"kind": "dog"}, "pair": [1]},
    {"name": "x", "pet": {"kind": "dog"}, "friends": [{"name": "y", "pet": {"kind": "dog"}}]},
    {"name": "x", "pet": {"kind": "dog"}, "friends": [{"name": "y"}]},
    {"pet": {"kind": "dog"}},
]


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_what_pydantic_writes(mode: Literal["validation", "serialization"]) -> None:
    schema = Owner.model_json_schema(mode=mode)
    assert "oneOf" in schema["$defs"]["Owner"]["properties"]["pet"]
    check(schema, OWNERS)


# z.discriminatedUnion("kind", [z.object({kind: z.literal("cat"), lives: z.int().min(1)}),
#   z.strictObject({kind: z.literal("dog"), tricks: z.array(z.string()).max(2)})]), in an object
# with an optional e-mail, an identifier (z.cuid), a record of numbers and a tuple.
ZOD = {
    # zod-to-json-schema, of Zod 3.
    "3": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "pet": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {
                            "kind": {"type": "string", "const": "cat"},
                            "lives": {"type": "integer", "minimum": 1},
                        },
                        "required": ["kind", "lives"],
                        "additionalProperties": False,
                    },
                    {
                        "type": "object",
                        "properties": {
                            "kind": {"type": "string", "const": "dog"},
                            "tricks": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
                        },
                        "required": ["kind", "tricks"],
                        "additionalProperties": False,
                    },
                ]
            },
            "mail": {"type": "string", "format": "email"},
            "id": {"type": "string", "format": "cuid"},
            "scores": {"type": "object", "additionalProperties": {"type": "number"}},
            "pair": {
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "items": [{"type": "number"}, {"type": "string"}],
            },
        },
        "required": ["pet", "scores"],
        "additionalProperties": False,
    },
    # z.toJSONSchema, of Zod 4.
    "4": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "pet": {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {
                            "kind": {"type": "string", "const": "cat"},
                            "lives": {
                                "type": "integer",
                                "minimum": 1,
                                "maximum": 9007199254740991,
                            },
                        },
                        "required": ["kind", "lives"],
                        "additionalProperties": False,
                    },
                    {
                        "type": "object",
                        "properties": {
                            "kind": {"type": "string", "const": "dog"},
                            "tricks": {"maxItems": 2, "type": "array", "items": {"type": "string"}},
                        },
                        "required": ["kind", "tricks"],
                        "additionalProperties": False,
                    },
                ]
            },
            "mail": {
                "type": "string",
                "format": "email",
                "pattern": r"^(?:[A-Za-z0-9_+-]+\.?)*[A-Za-z0-9_+-]@[A-Za-z0-9-]+\.[A-Za-z]{2,}$",
            },
            "id": {"type": "string", "format": "cuid"},
            "scores": {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "number"},
            },
            "pair": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "string"}]},
        },
        "required": ["pet", "scores"],
        "additionalProperties": False,
    },
}
SCORED: list[Any] = [
    {"pet": {"kind": "cat", "lives": 9}, "scores": {"a": 1, "b": 2.5}},
    {"pet": {"kind": "cat", "lives": 0}, "scores": {}},
    {"pet": {"kind": "dog", "tricks": []}, "id": "c1", "scores": {}},
    {"pet": {"kind": "dog", "lives": 1}, "scores": {}},
    {"pet": {"kind": "dog", "tricks": ["a", "b", "c"]}, "scores": {}},
    {"pet": {"kind": "dog", "tricks": []}, "mail": "a@b.org", "scores": {}, "pair": [1, "x"]},
    {"pet": {"kind": "dog", "tricks": []}, "scores": {"a": "x"}},
    {"pet": {"kind": "dog", "tricks": []}, "scores": {}, "pair": ["x", 1]},
    {"pet": {"kind": "dog", "tricks": []}},
]


@pytest.mark.parametrize("version", ZOD)
def test_what_zod_writes(version: str) -> None:
    check(ZOD[version], SCORED)


def check(schema: dict[str, Any], instances: list[Any]) -> None:
    matcher = matcher_of(schema)
    valid = [is_valid(schema, instance) for instance in instances]
    assert set(valid) == {True, False}
    assert [accepts(matcher, instance) for instance in instances] == valid
