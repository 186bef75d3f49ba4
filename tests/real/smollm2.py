"""A real chat model, SmolLM2-135M-Instruct as a GGUF file: against transformers, and over HTTP.

`nox -s real` runs this: its name keeps it from the quick suite. The variable SMOLLM2 names the
file. transformers takes most of a minute to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import pre_tokenizers

from src import LLM, SamplingParams
from src.core.config import Config
from src.models import load_model
from src.models.loading.options import LoadOptions
from src.text.tokenizer import Tokenizer
from tests.http.processes import ServerProcess
from tests.models.harness import dense_logits
from tests.support.engines import small_config
from tests.text.test_gguf_tokenizer import HARD, TEXTS

FILE = Path(os.environ["SMOLLM2"])
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many days are there in a week?",
    "Name three colours.",
)
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def their_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)


@pytest.fixture(scope="module")
def prompts(their_tokenizer: Any) -> list[list[int]]:
    return [
        their_tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


def config(**changes: Any) -> Config:
    return small_config(FILE, cache__memory_bytes=2**29, cache__block_size=16, **changes)


def test_token_ids_are_those_of_transformers(their_tokenizer: Any) -> None:
    own = Tokenizer.from_directory(FILE)
    source = Path(argparse.__file__).read_text()
    # transformers has no pattern called "smollm". This is that of the checkpoint's tokenizer.json,
    # which llama.cpp has too: digits of other scripts stand alone as well.
    digits = pre_tokenizers.Digits(individual_digits=True)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    their_tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    for text in (source, *TEXTS, *HARD):
        ids = list(own.encode(text))
        assert ids == their_tokenizer(text)["input_ids"], text
        assert own.decode(ids, skip_special_tokens=False) == text
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    assert own.chat_template.render(messages) == their_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


def test_logits_are_those_of_transformers(reference: Any, prompts: list[list[int]]) -> None:
    model = load_model(FILE, LoadOptions(dtype="float32"))
    for prompt in prompts:
        with torch.inference_mode():
            want = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        got = dense_logits(model, prompt).log_softmax(-1)
        assert (got - want).abs().max() < 1e-3


@torch.inference_mode()
def test_greedy_text_is_that_of_transformers(
    reference: Any, their_tokenizer: Any, prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    with LLM(config(model__dtype="float32")) as llm:
        results = llm.generate(prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        theirs = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=2,
            eos_token_id=[0, 2],
        )[0, len(prompt) :].tolist()
        assert result.token_ids == theirs
        assert result.text == their_tokenizer.decode(theirs, skip_special_tokens=True)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    environment = {
        "SLIPSTREAM_MODEL": str(FILE),
        "SLIPSTREAM_CACHE__MEMORY_BYTES": str(2**29),
        "SLIPSTREAM_MODEL__QUANTIZE_ACTIVATIONS": "false",
        "SLIPSTREAM_COMPILE__STARTUP": "off",
    }
    with ServerProcess.hypercorn(environment) as server:
        server.wait_ready()
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused")


def test_chats_are_streamed_while_vectors_are_computed(client: openai.OpenAI) -> None:
    """One process, one set of weights; each gets what it gets alone."""
    model = client.models.list().data[0].id
    # More than fit into a step, so that steps have tokens of both.
    texts = [f"{question} {number}" for number in range(60) for question in QUESTIONS]
    alone = [text_of(client, model, question) for question in QUESTIONS]
    (first,), (last,) = vectors_of(client, model, texts[:1]), vectors_of(client, model, texts[-1:])
    begun = threading.Barrier(len(QUESTIONS) + 1)
    arrived: list[str] = []

    def stream(question: str) -> str:
        begun.wait(60)
        text = text_of(client, model, question)
        arrived.append("text")
        return text

    def embed() -> list[list[float]]:
        begun.wait(60)
        found = vectors_of(client, model, texts)
        arrived.append("vectors")
        return found

    with ThreadPoolExecutor(len(QUESTIONS) + 1) as pool:
        made = pool.submit(embed)
        streams = [pool.submit(stream, question) for question in QUESTIONS]
        assert [each.result(300) for each in streams] == alone
        vectors = made.result(300)
    assert sorted(arrived) == ["text"] * len(QUESTIONS) + ["vectors"]
    assert len(vectors) == len(texts)
    assert {len(vector) for vector in vectors} == {576}
    # Rounded as any company of bfloat16 tokens is.
    for one, other in ((vectors[0], first), (vectors[-1], last)):
        assert cosine(one, other) > 0.998
    # And no other text's: those of two questions are this far apart at least.
    assert cosine(vectors[0], vectors[1]) < 0.95


def text_of(client: openai.OpenAI, model: str, question: str) -> str:
    """A greedy answer, from a stream."""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=NEW_TOKENS,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert sum(map(bool, pieces)) > 3
    return "".join(pieces)


def vectors_of(client: openai.OpenAI, model: str, texts: list[str]) -> list[list[float]]:
    return [item.embedding for item in client.embeddings.create(model=model, input=texts).data]


def cosine(one: list[float], other: list[float]) -> float:
    return float(torch.nn.functional.cosine_similarity(torch.tensor([one]), torch.tensor([other])))


def ask(client: openai.OpenAI, question: str, **more: Any) -> Any:
    model = client.models.list().data[0].id
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=100,
        **more,
    ).choices[0]


def test_chat(client: openai.OpenAI) -> None:
    assert client.models.list().data[0].id == FILE.stem
    choice = ask(client, QUESTIONS[0])
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"


def test_json_that_fits_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    choice = ask(
        client,
        "Give the capital of France and its country as JSON.",
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )
    found = json.loads(choice.message.content)
    assert found.keys() == {"city", "country"}
    assert found["city"] == "Paris"


def test_a_tool_call(client: openai.OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    choice = ask(client, "What is the weather in Paris?", tools=[tool], tool_choice="required")
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert "Paris" in json.loads(call.function.arguments)["city"]
