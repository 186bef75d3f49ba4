"""`cohere`: ClientV2 with a base of its own."""

from __future__ import annotations

import asyncio

import cohere
import pytest
from cohere.errors import BadRequestError

from tests.clients.common import ENCODER, ENCODER_URL, KEY

TEXTS = ["A happy dog.", "A sad cat.", "The weather in Paris."]
client = cohere.ClientV2(api_key=KEY, base_url=ENCODER_URL)


def test_embed() -> None:
    answer = client.embed(
        model=ENCODER,
        texts=TEXTS,
        input_type="search_document",
        embedding_types=["float", "ubinary"],
        truncate="END",
    )
    vectors = answer.embeddings.float_
    assert vectors is not None
    assert len({len(vector) for vector in vectors}) == 1
    assert len(vectors) == len(TEXTS)
    assert answer.embeddings.ubinary is not None
    assert [8 * len(bits) for bits in answer.embeddings.ubinary] == [len(vectors[0])] * 3
    assert answer.texts == TEXTS
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert answer.meta.billed_units.input_tokens


def test_rerank() -> None:
    answer = client.rerank(model=ENCODER, query="A happy dog.", documents=TEXTS, top_n=2)
    assert answer.results[0].index == 0
    assert len(answer.results) == 2
    assert answer.results[0].relevance_score >= answer.results[1].relevance_score


def test_async() -> None:
    async def main() -> list[int]:
        client = cohere.AsyncClientV2(api_key=KEY, base_url=ENCODER_URL)
        answers = await asyncio.gather(
            *(client.rerank(model=ENCODER, query=text, documents=TEXTS) for text in TEXTS)
        )
        return [answer.results[0].index for answer in answers]

    assert asyncio.run(main()) == [0, 1, 2]


def test_bad_input() -> None:
    with pytest.raises(BadRequestError):
        client.embed(model=ENCODER, texts=[""], input_type="search_query")
    with pytest.raises(BadRequestError):
        client.rerank(model=ENCODER, query="", documents=TEXTS)
