"""`instructor`: answers as pydantic models, in every mode that OpenAI's protocol has for it."""

from __future__ import annotations

import instructor
import openai
import pydantic
import pytest

from tests.clients.common import BASE_URL, KEY, MODEL, PERSON, WEATHER, user


class Person(pydantic.BaseModel):
    """A person and a price."""

    name: str
    price: int


class get_weather(pydantic.BaseModel):
    """Get the weather in a city."""

    city: str


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY), mode=mode)


def test_by_default() -> None:
    """Its default mode makes the schema a tool that must be called: one that the model knows."""
    made = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY))
    answer = made.chat.completions.create(
        model=MODEL, messages=user(WEATHER), response_model=get_weather, temperature=0
    )
    assert answer.model_dump() == {"city": "Paris"}


@pytest.mark.parametrize(
    ("mode", "question", "kind", "expected"),
    [
        ("TOOLS", WEATHER, get_weather, {"city": "Paris"}),
        ("JSON_SCHEMA", PERSON, Person, {"name": "Rosa", "price": 27}),
    ],
)
def test_modes(
    mode: str, question: str, kind: type[pydantic.BaseModel], expected: dict[str, object]
) -> None:
    answer = client(instructor.Mode[mode]).chat.completions.create(
        model=MODEL,
        messages=user(question),
        response_model=kind,
        temperature=0,
        max_retries=0,
    )
    # It answers with a class of its own, made from this one.
    assert answer.model_dump() == expected


def test_json_mode() -> None:
    """The schema is in the prompt only, which is too much for the model: the form counts."""
    answer = client(instructor.Mode.JSON).chat.completions.create(
        model=MODEL, messages=user(PERSON), response_model=Person, temperature=0, max_tokens=200
    )
    assert isinstance(answer, Person)


def test_partial_answers_in_a_stream() -> None:
    partial = list(
        client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
            model=MODEL, messages=user(PERSON), response_model=Person, temperature=0, max_tokens=200
        )
    )
    assert len(partial) > 1
    assert partial[-1].price == 27
