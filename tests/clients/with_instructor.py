"""`instructor`: answers as pydantic models, in every mode that OpenAI's protocol has for it."""

from __future__ import annotations

import instructor
import openai
import pydantic
import pytest

from tests.clients.common import BASE_URL, KEY, MODEL, PERSON, user


class Person(pydantic.BaseModel):
    """A person and a price."""

    name: str
    price: int


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY), mode=mode)


def test_by_default() -> None:
    """Its default mode makes the schema a tool that must be called."""
    made = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY))
    answer = made.chat.completions.create(
        model=MODEL, messages=user(PERSON), response_model=Person, temperature=0, max_tokens=200
    )
    assert isinstance(answer, Person)


@pytest.mark.parametrize("mode", ["JSON", "JSON_SCHEMA", "TOOLS"])
def test_modes(mode: str) -> None:
    answer = client(instructor.Mode[mode]).chat.completions.create(
        model=MODEL,
        messages=user(PERSON),
        response_model=Person,
        temperature=0,
        max_tokens=200,
        max_retries=0,
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
