"""`langchain-huggingface` over `huggingface_hub`: clients of text-embeddings-inference."""

from __future__ import annotations

import asyncio

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import BadRequestError
from langchain_huggingface import HuggingFaceEndpointEmbeddings

from tests.clients.common import ENCODER_URL, KEY

TEXTS = ["A happy dog.", "A sad cat.", "The weather\nin Paris."]
# Those of text-embeddings-inference are given the server's own address.
ADDRESSES = pytest.mark.parametrize("path", ["", "/", "/embed"])


def client_of(path: str) -> HuggingFaceEndpointEmbeddings:
    """It takes no address of a server itself since version 1.2.3, but the hub's clients do."""
    client = HuggingFaceEndpointEmbeddings(huggingfacehub_api_token=KEY)
    client.client = InferenceClient(model=f"{ENCODER_URL}{path}", token=KEY)
    client.async_client = AsyncInferenceClient(model=f"{ENCODER_URL}{path}", token=KEY)
    return client


@ADDRESSES
def test_vectors(path: str) -> None:
    client = client_of(path)
    vectors = client.embed_documents(TEXTS)
    assert len(vectors) == len(TEXTS)
    assert client.embed_query(TEXTS[1]) == pytest.approx(vectors[1], abs=1e-3)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-3)


@ADDRESSES
def test_async(path: str) -> None:
    async def main() -> list[list[float]]:
        client = client_of(path)
        return await asyncio.gather(*(client.aembed_query(text) for text in TEXTS))

    for one, other in zip(asyncio.run(main()), client_of(path).embed_documents(TEXTS), strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_fields_of_the_call() -> None:
    client = client_of("")
    client.model_kwargs = {"normalize": False, "truncate": True}
    (short,) = client.embed_documents(["word " * 4000])
    assert sum(number**2 for number in short) != pytest.approx(1.0, abs=1e-2)


def test_bad_input() -> None:
    with pytest.raises(BadRequestError, match="empty"):
        client_of("").embed_documents([""])
