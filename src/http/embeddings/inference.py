"""``POST /embed``, as text-embeddings-inference has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from src.core.outputs import Embedding
from src.http.embeddings.inputs import given_texts, pooled_options, renaming
from src.http.embeddings.vectors import held_numbers, json_numbers, vector_size
from src.http.generation.sampling import check_neutral
from src.http.protocol.inference import NEUTRAL_IN_INFERENCE, EmbedRequest
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder

_decode: Final = RequestDecoder(EmbedRequest)


async def embed(call: Call) -> None:
    """The vectors of one text or of many, as a list of lists."""
    request = _decode(call)
    check_neutral(request, NEUTRAL_IN_INFERENCE)
    engine = await call.admitted_engine()
    texts = given_texts(request.inputs, call.server.config.http.max_embedding_inputs, "inputs")
    made = engine.embed(
        texts,
        dimensions=request.dimensions,
        truncate=-1 if request.truncate else None,
        prompt_name=request.prompt_name,
        normalize=request.normalize is not False,
        admission=call.admission,
        **pooled_options(call, timeout=request.timeout),
    )
    num_texts = len(texts)
    count = num_texts * vector_size(engine, request.dimensions)
    del texts, request
    with (
        contextlib.closing(made),
        renaming({"input": "inputs"}),
        held_numbers(call, num_texts, count, field="inputs"),
    ):
        embeddings = await made
        await call.answer_in_pieces(_pieces(embeddings))


def _pieces(embeddings: list[Embedding]) -> Iterator[bytes]:
    for index, embedding in enumerate(embeddings):
        yield b"," if index else b"["
        yield from json_numbers(embedding.numbers)
    yield b"]"
