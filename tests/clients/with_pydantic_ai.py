"""`pydantic-ai`: agents with tools and typed answers, over chat completions and responses."""

from __future__ import annotations

import asyncio

import pydantic
import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.common import (
    ADD,
    BASE_URL,
    FACT,
    FACT_ANSWER,
    KEY,
    MODEL,
    PERSON,
    SUM,
    SUM_ANSWER,
    WEATHER,
)

PROVIDER = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
CHAT = OpenAIChatModel(MODEL, provider=PROVIDER)
RESPONSES = OpenAIResponsesModel(MODEL, provider=PROVIDER)
MODELS = pytest.mark.parametrize("model", [CHAT, RESPONSES], ids=["chat", "responses"])
GREEDY = {"temperature": 0.0, "max_tokens": 200}


class Person(pydantic.BaseModel):
    """A person and a price."""

    name: str
    price: int


class Weather(pydantic.BaseModel):
    city: str


@MODELS
def test_a_run(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    done = Agent(model, model_settings=GREEDY).run_sync(SUM)
    assert done.output == SUM_ANSWER
    assert done.usage.output_tokens > 0


@MODELS
def test_a_stream(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    async def main() -> list[str]:
        async with Agent(model, model_settings=GREEDY).run_stream(FACT) as run:
            return [text async for text in run.stream_text(delta=True, debounce_by=None)]

    deltas = asyncio.run(main())
    assert "".join(deltas) == FACT_ANSWER
    assert len(deltas) > 2


@MODELS
def test_tools(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    agent = Agent(model, model_settings=GREEDY)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    assert agent.run_sync(ADD).output == "The result is 579."


@MODELS
def test_typed_answers(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    agent = Agent(model, output_type=NativeOutput(Person), model_settings=GREEDY)
    assert agent.run_sync(PERSON).output == Person(name="Rosa", price=27)


@MODELS
def test_typed_answers_by_a_tool(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    """The default: the answer's type is a tool that must be called."""
    output = ToolOutput(Weather, name="get_weather", description="Get the weather in a city.")
    agent = Agent(model, output_type=output, model_settings=GREEDY)
    assert agent.run_sync(WEATHER).output == Weather(city="Paris")
