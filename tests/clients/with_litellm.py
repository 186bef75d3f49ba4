"""litellm, as a library: the provider `hosted_vllm`, and `openai` with a base of its own."""

from __future__ import annotations

import asyncio
import json

import litellm
import pydantic
import pytest

from tests.clients.common import (
    ADD,
    ADD_NUMBERS,
    BASE_URL,
    ENCODER,
    ENCODER_URL,
    FACT,
    FACT_ANSWER,
    KEY,
    MODEL,
    PERSON,
    STORY,
    SUM,
    SUM_ANSWER,
    user,
)

PROVIDERS = pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])


class Person(pydantic.BaseModel):
    name: str
    price: int


def ask(provider: str) -> dict[str, object]:
    return {
        "model": f"{provider}/{MODEL}",
        "api_base": BASE_URL,
        "api_key": KEY,
        "temperature": 0,
        "timeout": 60,
        "num_retries": 0,
    }


@PROVIDERS
def test_chat(provider: str) -> None:
    answer = litellm.completion(messages=user(SUM), **ask(provider))
    assert answer.choices[0].message.content == SUM_ANSWER
    assert answer.usage.completion_tokens > 0


@PROVIDERS
def test_a_stream(provider: str) -> None:
    chunks = list(
        litellm.completion(
            messages=user(FACT),
            stream=True,
            stream_options={"include_usage": True},
            **ask(provider),
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == FACT_ANSWER
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == FACT_ANSWER
    assert chunks[-1].usage.prompt_tokens > 0


@PROVIDERS
def test_tools(provider: str) -> None:
    first = litellm.completion(messages=user(ADD), tools=[ADD_NUMBERS], **ask(provider))
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 123, "b": 456}
    result = {"role": "tool", "tool_call_id": call.id, "content": "579"}
    messages = [*user(ADD), first.choices[0].message, result]
    second = litellm.completion(messages=messages, tools=[ADD_NUMBERS], **ask(provider))
    assert second.choices[0].message.content == "The result is 579."


@PROVIDERS
def test_response_format(provider: str) -> None:
    answer = litellm.completion(messages=user(PERSON), response_format=Person, **ask(provider))
    assert Person.model_validate_json(answer.choices[0].message.content).price == 27


def test_completions() -> None:
    answer = litellm.text_completion(
        prompt=STORY, max_tokens=8, **{**ask("hosted_vllm"), "model": f"hosted_vllm/{MODEL}"}
    )
    assert answer.choices[0].text


def test_responses() -> None:
    answer = litellm.responses(input=SUM, **ask("openai"))
    assert answer.output[0].content[0].text == SUM_ANSWER


def test_async() -> None:
    async def main() -> list[str]:
        answers = await asyncio.gather(
            *(litellm.acompletion(messages=user(SUM), **ask("hosted_vllm")) for _ in range(8))
        )
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(main()) == [SUM_ANSWER] * 8


def test_errors_are_told_apart() -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=user(SUM), **{**ask("openai"), "model": "openai/other"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=user(SUM), **{**ask("hosted_vllm"), "temperature": 3})


@PROVIDERS
def test_what_is_too_long_is_known_as_such(provider: str) -> None:
    for fields in (
        {"messages": user("word " * 4000)},
        {"messages": user(SUM), "max_tokens": 10**6},
    ):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**{**ask(provider), **fields})


TEXTS = ["A happy dog.", "A sad cat.", "The weather in Paris."]


@PROVIDERS
def test_embeddings(provider: str) -> None:
    asked = {key: value for key, value in ask(provider).items() if key != "temperature"}
    answer = litellm.embedding(input=TEXTS, **asked)
    assert [item["index"] for item in answer.data] == [0, 1, 2]
    assert len({len(item["embedding"]) for item in answer.data}) == 1
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize("provider", ["hosted_vllm", "cohere", "jina_ai"])
def test_rerank(provider: str) -> None:
    answer = litellm.rerank(
        model=f"{provider}/{ENCODER}",
        api_base=ENCODER_URL,
        api_key=KEY,
        query="A sad cat.",
        documents=TEXTS,
        top_n=2,
    )
    assert answer.results[0]["index"] == 1
    assert len(answer.results) == 2
