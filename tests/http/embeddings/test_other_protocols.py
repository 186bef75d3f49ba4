"""`/v2/embed` of Cohere, and `/embed` and `/info` of text-embeddings-inference."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import httpx
import pytest

from src.core.version import VERSION
from src.http.embeddings.cohere import _bits
from tests.http.asking import post, refused
from tests.http.embeddings.conftest import SIZE

pytestmark = pytest.mark.anyio

TEXTS = ["the quick brown fox", "a lazy dog"]
LONG = "the quick brown fox jumps over the lazy dog " * 30


async def plain(client: httpx.AsyncClient, *texts: str, **fields: Any) -> list[list[float]]:
    body = await post(client, "/v1/embeddings", input=list(texts), **fields)
    return [item["embedding"] for item in body["data"]]


def near(vectors: list[list[float]]) -> list[Any]:
    return [pytest.approx(vector, abs=1e-5) for vector in vectors]


async def test_cohere_gives_every_form_of_the_same_vectors(
    embedding_client: httpx.AsyncClient,
) -> None:
    client, want = embedding_client, await plain(embedding_client, *TEXTS)
    forms = ["float", "base64", "binary", "ubinary", "float"]
    body = await post(
        client, "/v2/embed", model="tiny-bert", texts=TEXTS, embedding_types=forms[:4]
    )
    assert set(body) == {"id", "response_type", "embeddings", "texts", "meta"}
    assert body["response_type"] == "embeddings_by_type"
    assert body["texts"] == TEXTS
    assert body["meta"]["api_version"] == {"version": "2"}
    usage = (await post(client, "/v1/embeddings", input=TEXTS))["usage"]
    assert body["meta"]["billed_units"] == {"input_tokens": usage["prompt_tokens"]}
    made = body["embeddings"]
    assert set(made) == set(forms)
    assert made["float"] == near(want)
    for index, vector in enumerate(made["float"]):
        coded = struct.unpack(f"<{SIZE}f", base64.b64decode(made["base64"][index]))
        assert list(coded) == pytest.approx(vector)
        bits = [int(value > 0) for value in vector]
        packed = [
            sum(bit << (7 - place) for place, bit in enumerate(bits[start : start + 8]))
            for start in range(0, SIZE, 8)
        ]
        assert made["ubinary"][index] == packed
        assert made["binary"][index] == [byte - 128 for byte in packed]
    assert set((await post(client, "/v2/embed", texts=TEXTS))["embeddings"]) == {"float"}


def test_the_bit_of_a_zero_is_not_set() -> None:
    numbers = struct.pack("=8f", 0.5, 0.0, -0.0, -0.5, 0.0, 1.0, 0.0, 2.0)
    assert _bits(numbers) == bytes([0b10000101])


async def test_kinds_of_input_are_prompts_of_the_checkpoint(
    embedding_client: httpx.AsyncClient, client: httpx.AsyncClient
) -> None:
    async def made(client: httpx.AsyncClient, **fields: Any) -> list[list[float]]:
        body = await post(client, "/v2/embed", texts=["fox"], **fields)
        found: list[list[float]] = body["embeddings"]["float"]
        return found

    named = near(await plain(embedding_client, "fox", prompt_name="query"))
    bare = near(await plain(embedding_client, "fox"))
    assert await made(embedding_client, input_type="search_query") == named
    assert await made(embedding_client, input_type="query") == named
    assert await made(embedding_client, input_type="search_document") == bare
    for kind in ("clustering", "unheard-of"):
        error = await refused(embedding_client, "/v2/embed", texts=["fox"], input_type=kind)
        assert error["param"] == "input_type"
        assert "(query)" in error["message"]
    # It has no prompts.
    bare = near(await plain(client, "fox"))
    for kind in ("search_query", "search_document", "clustering", "classification"):
        assert await made(client, input_type=kind) == bare
    error = await refused(client, "/v2/embed", texts=["fox"], input_type="unheard-of")
    assert error["param"] == "input_type"


async def test_cohere_cuts_texts_only_where_it_is_asked_to(
    embedding_client: httpx.AsyncClient,
) -> None:
    for fields, kept in (
        ({"truncate": "END"}, 130),
        ({"max_tokens": 7}, 7),
        ({"truncate": "END", "max_tokens": 9}, 9),
        ({"max_tokens": 1000}, 130),
    ):
        body = await post(embedding_client, "/v2/embed", texts=[LONG], **fields)
        assert body["meta"]["billed_units"] == {"input_tokens": kept}
        want = await plain(embedding_client, LONG, truncate_prompt_tokens=kept)
        assert body["embeddings"]["float"] == near(want)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "texts", "missing"),
        ({"texts": []}, "texts", "must not be an empty list"),
        ({"texts": ["fox", ""]}, "texts", "texts[1]: texts must not be empty"),
        ({"texts": ["fox"] * 41}, "texts", "at most 40 entries, got 41"),
        ({"texts": ["fox"] * 37}, "texts", f"the results of 37 texts are {37 * SIZE} numbers"),
        ({"texts": [LONG]}, "texts", "this model takes up to 130"),
        ({"texts": [LONG], "truncate": "NONE"}, "texts", "this model takes up to 130"),
        ({"texts": ["fox"], "truncate": "NONE", "max_tokens": 5}, "max_tokens", "NONE"),
        ({"texts": ["fox"], "output_dimension": 8}, "output_dimension", "does not say"),
        ({"texts": ["fox"], "max_tokens": 2}, "max_tokens", "max_tokens = 2 leaves no token"),
        ({"texts": ["fox"], "images": ["data:"]}, "images", "not supported"),
        ({"texts": ["fox"], "inputs": [{}]}, "inputs", "not supported"),
        ({"texts": ["fox"], "priority": 2**63}, "priority", "priority must be"),
    ],
)
async def test_bad_input_of_cohere_is_400_and_names_its_field(
    embedding_client: httpx.AsyncClient, fields: dict[str, Any], param: str, message: str
) -> None:
    error = await refused(embedding_client, "/v2/embed", **fields)
    assert (error["param"], message in error["message"]) == (param, True), error


@pytest.mark.parametrize(
    "fields",
    [
        {"texts": "fox"},
        {"texts": [5]},
        {"texts": ["fox"], "embedding_types": []},
        {"texts": ["fox"], "embedding_types": ["int8"]},
        {"texts": ["fox"], "truncate": "START"},
        {"texts": ["fox"], "max_tokens": 0},
    ],
)
async def test_malformed_requests_of_cohere_are_400(
    embedding_client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    await refused(embedding_client, "/v2/embed", **fields)


@pytest.mark.parametrize("path", ["/embed", "/"])
async def test_inference_answers_with_vectors_alone(
    embedding_client: httpx.AsyncClient, client: httpx.AsyncClient, path: str
) -> None:
    async def made(client: httpx.AsyncClient, **fields: Any) -> Any:
        answer = await client.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    want = await plain(embedding_client, *TEXTS)
    assert await made(embedding_client, inputs=TEXTS) == near(want)
    assert await made(embedding_client, inputs=TEXTS[0]) == near(want[:1])
    assert await made(embedding_client, inputs=[[5, 6], [7]]) == near(
        await plain(embedding_client, [5, 6], [7])  # type: ignore[arg-type]
    )
    cut = await plain(embedding_client, LONG, truncate_prompt_tokens=-1)
    assert await made(embedding_client, inputs=LONG, truncate=True) == near(cut)
    named = await plain(embedding_client, "fox", prompt_name="query")
    assert await made(embedding_client, inputs="fox", prompt_name="query") == near(named)
    # The files of this one say nothing of normalizing.
    (raw,) = await plain(client, "fox")
    length = math.sqrt(sum(value * value for value in raw))
    assert length > 1.1
    assert await made(client, inputs="fox", normalize=False) == near([raw])
    assert await made(client, inputs="fox") == near([[value / length for value in raw]])
    # And those of this one do.
    (own,) = await made(embedding_client, inputs="fox", normalize=False)
    assert math.sqrt(sum(value * value for value in own)) > 1.1


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "inputs", "missing"),
        ({"inputs": []}, "inputs", "must not be an empty list"),
        ({"inputs": ["fox", ""]}, "inputs", "inputs[1]: inputs must not be empty"),
        ({"inputs": ["fox"] * 41}, "inputs", "at most 40 entries, got 41"),
        ({"inputs": [LONG]}, "inputs", "this model takes up to 130"),
        ({"inputs": "fox", "prompt_name": "no"}, "prompt_name", "(query)"),
        ({"inputs": "fox", "dimensions": 8}, "dimensions", "does not say"),
        ({"inputs": "fox", "truncation_direction": "Left"}, "truncation_direction", "supported"),
    ],
)
async def test_bad_input_of_inference_is_400_and_names_its_field(
    embedding_client: httpx.AsyncClient, fields: dict[str, Any], param: str, message: str
) -> None:
    error = await refused(embedding_client, "/embed", **fields)
    assert (error["param"], message in error["message"]) == (param, True), error


async def test_info_says_what_the_model_takes(
    embedding_client: httpx.AsyncClient, client: httpx.AsyncClient
) -> None:
    body = (await embedding_client.get("/info")).json()
    assert body["model_id"] == "tiny-bert"
    assert body["model_type"] == {"embedding": {"pooling": "mean"}}
    assert body["max_input_length"] == 130
    assert body["max_client_batch_size"] == 40
    assert body["auto_truncate"] is False
    assert body["version"] == VERSION
    assert (await client.get("/info")).json()["model_type"] == {
        "embedding": {"pooling": "last_token"}
    }
