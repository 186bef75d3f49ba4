"""`/v1/embeddings`: a model that embeds, and one that generates beside it."""

from __future__ import annotations

import base64
import struct
from typing import Any

import httpx
import pytest
import torch

from src.core.plan import StepPlan
from src.engine.execution.pooling import RowPooling, Vectors
from tests.http.embeddings.conftest import SIZE

pytestmark = pytest.mark.anyio


async def embedded(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/embeddings", json=fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def vectors(body: dict[str, Any]) -> list[Any]:
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    return [item["embedding"] for item in body["data"]]


async def test_all_kinds_of_input_give_the_same_vectors(
    embedding_client: httpx.AsyncClient,
) -> None:
    client, texts = embedding_client, ["the quick brown fox", "a lazy dog"]
    ids = [
        (await client.post("/tokenize", json={"prompt": text})).json()["tokens"] for text in texts
    ]
    body = await embedded(client, model="tiny-bert", input=texts, user="somebody")
    assert body["object"] == "list"
    assert body["model"] == "tiny-bert"
    assert [item["object"] for item in body["data"]] == ["embedding"] * 2
    count = sum(map(len, ids))
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    both = vectors(body)
    assert vectors(await embedded(client, input=ids)) == [pytest.approx(one) for one in both]
    for text, own, vector in zip(texts, ids, both, strict=True):
        assert sum(value * value for value in vector) == pytest.approx(1)
        for given in (text, own, [text], [own]):
            assert vectors(await embedded(client, input=given)) == [pytest.approx(vector)]


async def test_base64_holds_the_numbers_in_little_endian_order(
    embedding_client: httpx.AsyncClient,
) -> None:
    plain = vectors(await embedded(embedding_client, input=["fox", "dog"]))
    coded = vectors(
        await embedded(embedding_client, input=["fox", "dog"], encoding_format="base64")
    )
    for numbers, text in zip(plain, coded, strict=True):
        assert struct.unpack(f"<{SIZE}f", base64.b64decode(text)) == pytest.approx(numbers)


async def test_an_answer_of_many_vectors_is_whole(embedding_client: httpx.AsyncClient) -> None:
    # More than are encoded in one turn.
    body = await embedded(embedding_client, input=[[3 + index] for index in range(36)])
    assert len(vectors(body)) == 36
    one = vectors(await embedded(embedding_client, input=[3 + 17]))
    assert vectors(body)[17] == pytest.approx(one[0], abs=1e-5)


async def test_fields_of_vllm_and_sentence_transformers(
    embedding_client: httpx.AsyncClient,
) -> None:
    client, text = embedding_client, "the quick brown fox jumps over the lazy dog " * 30
    for keeps in (5, -1):
        body = await embedded(client, input=text, truncate_prompt_tokens=keeps)
        assert body["usage"]["prompt_tokens"] == (130 if keeps == -1 else keeps)
    bare = await embedded(client, input="fox", add_special_tokens=False)
    whole = await embedded(client, input="fox")
    assert bare["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] - 2
    named = await embedded(client, input="fox", prompt_name="query", priority=1)
    written = await embedded(client, input="query: fox", dimensions=SIZE, timeout=60)
    assert vectors(named)[0] == pytest.approx(vectors(written)[0])


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "must not be an empty list"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": ["fox", ""]}, "input", "input[1]"),
        ({"input": [[3], []]}, "input", "input[1]"),
        ({"input": [3, "fox"]}, "input", "mixed list"),
        ({"input": [3, 320]}, "input", "from 0 to 319, got 320"),
        ({"input": [3, -1]}, "input", "from 0 to 319, got -1"),
        ({"input": ["fox"] * 41}, "input", "at most 40 entries, got 41"),
        ({"input": ["fox"] * 37}, "input", f"the results of 37 texts are {37 * SIZE} numbers"),
        ({"input": [5] * 131}, "input", "131 tokens, and this model takes up to 130"),
        ({"input": "fox " * 200}, "input", "this model takes up to 130"),
        ({"input": "fox", "dimensions": 8}, "dimensions", "does not say"),
        ({"input": "fox", "truncate_prompt_tokens": 131}, "truncate_prompt_tokens", "1 to 130"),
        ({"input": "fox", "prompt_name": "no"}, "prompt_name", "(query)"),
        ({"input": "fox", "priority": 2**63}, "priority", "priority must be"),
        ({"input": None}, "input", "missing"),
    ],
)
async def test_bad_input_is_400_and_names_its_field(
    embedding_client: httpx.AsyncClient, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = await embedding_client.post("/v1/embeddings", json=fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("normalize", True),
        ("normalize", False),
        ("input_type", "query"),
        ("task", "retrieval.query"),
        ("truncation_side", "left"),
        ("embed_dtype", "float16"),
        ("endianness", "big"),
        ("late_chunking", True),
    ],
)
async def test_fields_that_would_change_vectors_are_refused_by_name(
    embedding_client: httpx.AsyncClient, field: str, value: Any
) -> None:
    for rest in ({"input": "fox"}, {}):
        answer = await embedding_client.post("/v1/embeddings", json={field: value, **rest})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    await embedded(embedding_client, input="fox", **{field: None})


async def test_values_that_ask_for_nothing_are_taken(embedding_client: httpx.AsyncClient) -> None:
    asked = {"truncation_side": "right", "embed_dtype": "float32", "endianness": "little"}
    assert vectors(await embedded(embedding_client, input="fox", **asked))


async def test_a_salt_keeps_cached_prefixes_apart(client: httpx.AsyncClient) -> None:
    async def hits() -> float:
        text = (await client.get("/metrics")).text
        name = "vllm:prompt_tokens_cached_total{"
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    given: dict[str, Any] = {"input": list(range(3, 53))}
    before = await hits()
    for salt in ("one", "other"):
        await embedded(client, cache_salt=salt, **given)
        assert await hits() == before
    await embedded(client, cache_salt="other", **given)
    assert await hits() > before
    for salt in ("", "x" * 257):
        answer = await client.post("/v1/embeddings", json={"cache_salt": salt, **given})
        assert answer.status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input": 5},
        {"input": "fox", "encoding_format": "binary"},
        {"input": "a", "dimensions": 0},
    ],
)
async def test_malformed_requests_are_400(
    embedding_client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    assert (await embedding_client.post("/v1/embeddings", json=fields)).status_code == 400


async def test_a_vector_that_is_not_finite_is_500_and_names_its_text(
    embedding_client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = RowPooling.pool

    def broken(self: RowPooling, plan: StepPlan, hidden: torch.Tensor) -> Vectors | None:
        made = pool(self, plan, hidden)
        lengths = {step.row: step.num_tokens for step in plan.rows}
        for row, vector in () if made is None else zip(made.rows, made.values, strict=True):
            if lengths[row] == 9:
                vector[0] = torch.nan
        return made

    monkeypatch.setattr(RowPooling, "pool", broken)
    answer = await embedding_client.post("/v1/embeddings", json={"input": [[5], [5, 6], [5] * 9]})
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["message"].startswith("input[2]: the model gave no valid vector")
    assert (error["type"], error["param"]) == ("server_error", "input")
    assert error["code"] == "invalid_vector"
    assert len(vectors(await embedded(embedding_client, input=[[5], [5, 6]]))) == 2


CHAT = [{"role": "user", "content": "Once upon"}, {"role": "assistant", "content": "a time"}]


async def test_a_conversation_is_embedded_as_its_template_spells_it(
    client: httpx.AsyncClient,
) -> None:
    for options in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        asked = {"messages": CHAT, "add_generation_prompt": False, **options}
        ids = (await client.post("/tokenize", json=asked)).json()["tokens"]
        body = await embedded(client, messages=CHAT, **options)
        assert body["usage"]["prompt_tokens"] == len(ids)
        (want,) = vectors(await embedded(client, input=ids))
        assert vectors(body) == [pytest.approx(want, abs=1e-5)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": CHAT, "input": "fox"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": CHAT, "chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": CHAT, "prompt_name": "query"}, "prompt_name"),
        # Of more characters than the context can spell, and of more tokens.
        ({"messages": [{"role": "user", "content": "fox " * 4000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "fox " * 1100}]}, "messages"),
        ({"input": "fox", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"input": "fox", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    ],
)
async def test_bad_conversations_are_400(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post("/v1/embeddings", json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_model_that_embeds_refuses_to_generate(
    embedding_client: httpx.AsyncClient,
) -> None:
    answer = await embedding_client.post("/v1/completions", json={"prompt": "fox"})
    assert answer.status_code == 400
    assert "what it can do is embed" in answer.json()["error"]["message"]
    unknown = await embedding_client.post("/v1/embeddings", json={"input": "a", "model": "no"})
    assert unknown.status_code == 404


async def test_a_model_that_generates_embeds_too(client: httpx.AsyncClient) -> None:
    body = await embedded(client, model="tiny", input=["Once upon a time", "One day"])
    assert [len(vector) for vector in vectors(body)] == [SIZE] * 2
    cards = (await client.get("/v1/models")).json()["data"]
    assert cards[0]["tasks"] == ["generate", "embed", "token_embed"]


async def test_models_say_their_tasks(embedding_client: httpx.AsyncClient) -> None:
    (card,) = (await embedding_client.get("/v1/models")).json()["data"]
    assert card["tasks"] == ["embed", "score", "token_embed"]
