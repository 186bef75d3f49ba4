"""`langchain-openai`: ChatOpenAI with a base of its own."""

from __future__ import annotations

import asyncio

import pydantic
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from tests.clients.common import (
    ADD,
    BASE_URL,
    FACT,
    FACT_ANSWER,
    KEY,
    MODEL,
    PERSON,
    STORY,
    SUM,
    SUM_ANSWER,
    WEATHER,
)

llm = ChatOpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, temperature=0, max_retries=0)


class Person(pydantic.BaseModel):
    """A person and a price."""

    name: str
    price: int


class get_weather(pydantic.BaseModel):
    """Get the weather in a city."""

    city: str


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_invoke() -> None:
    answer = llm.invoke(SUM)
    assert answer.content == SUM_ANSWER
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def test_stream() -> None:
    chunks = list(llm.stream(FACT))
    assert "".join(str(chunk.content) for chunk in chunks) == FACT_ANSWER
    assert len(chunks) > 3


def test_batch_and_async() -> None:
    assert [a.content for a in llm.batch([SUM, FACT] * 4)] == [SUM_ANSWER, FACT_ANSWER] * 4

    async def main() -> str:
        return "".join([str(chunk.content) async for chunk in llm.astream(FACT)])

    assert asyncio.run(main()) == FACT_ANSWER


def test_tools() -> None:
    bound = llm.bind_tools([add])
    first = bound.invoke(ADD)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 123, "b": 456})
    result = add.invoke(call)
    assert isinstance(result, ToolMessage)
    assert bound.invoke([HumanMessage(ADD), first, result]).content == "The result is 579."


@pytest.mark.parametrize("choice", ["any", "add"])
def test_tools_that_must_be_called(choice: str) -> None:
    answer = llm.bind_tools([add], tool_choice=choice).invoke(ADD, max_tokens=200)
    assert answer.tool_calls[0]["args"] == {"a": 123, "b": 456}


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output(method: str) -> None:
    structured = llm.with_structured_output(Person, method=method)
    assert structured.invoke(PERSON) == Person(name="Rosa", price=27)


def test_structured_output_by_a_tool() -> None:
    structured = llm.with_structured_output(get_weather, method="function_calling")
    assert structured.invoke(WEATHER) == get_weather(city="Paris")


def test_responses() -> None:
    answer = ChatOpenAI(
        base_url=BASE_URL, api_key=KEY, model=MODEL, temperature=0, use_responses_api=True
    ).invoke(SUM)
    assert answer.text == SUM_ANSWER


def test_completions() -> None:
    text = OpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, max_tokens=8).invoke(STORY)
    assert text


def test_embeddings() -> None:
    # With the check it sends token ids of OpenAI's tokenizer.
    embeddings = OpenAIEmbeddings(
        base_url=BASE_URL, api_key=KEY, model=MODEL, check_embedding_ctx_length=False
    )
    texts = [STORY, SUM, FACT]
    vectors = embeddings.embed_documents(texts)
    assert len(vectors) == 3
    for text, vector in zip(texts, vectors, strict=True):
        assert embeddings.embed_query(text) == pytest.approx(vector, abs=1e-3)
