"""The OpenAI Agents SDK, over responses (its default) and over chat completions."""

from __future__ import annotations

import asyncio

import agents
import openai
import pydantic
import pytest
from openai.types.responses import ResponseTextDeltaEvent

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
)

# Traces would go to OpenAI.
agents.set_tracing_disabled(True)
APIS = pytest.mark.parametrize("api", ["responses", "chat_completions"])
GREEDY = agents.ModelSettings(temperature=0, max_tokens=200)


class Person(pydantic.BaseModel):
    name: str
    price: int


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agent(**fields: object) -> agents.Agent[None]:
    return agents.Agent(name="Slip", model=MODEL, model_settings=GREEDY, **fields)


@pytest.fixture(autouse=True)
def chosen(api: str) -> None:
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY))
    agents.set_default_openai_api(api)


@APIS
def test_a_run(api: str) -> None:
    assert agents.Runner.run_sync(agent(), SUM).final_output == SUM_ANSWER


@APIS
def test_a_stream(api: str) -> None:
    async def main() -> tuple[list[str], object]:
        run = agents.Runner.run_streamed(agent(), FACT)
        deltas = [
            event.data.delta
            async for event in run.stream_events()
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
        ]
        return deltas, run.final_output

    deltas, final = asyncio.run(main())
    assert "".join(deltas) == final == FACT_ANSWER
    assert len(deltas) > 2


@APIS
def test_tools(api: str) -> None:
    done = agents.Runner.run_sync(agent(tools=[add]), ADD)
    assert done.final_output == "The result is 579."
    assert any(item.type == "tool_call_output_item" for item in done.new_items)


@APIS
def test_tools_in_a_stream(api: str) -> None:
    async def main() -> object:
        run = agents.Runner.run_streamed(agent(tools=[add]), ADD)
        async for _ in run.stream_events():
            pass
        return run.final_output

    assert asyncio.run(main()) == "The result is 579."


@APIS
def test_typed_answers(api: str) -> None:
    done = agents.Runner.run_sync(agent(output_type=Person), PERSON)
    assert done.final_output == Person(name="Rosa", price=27)
