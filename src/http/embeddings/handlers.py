"""``POST /v1/embeddings``."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Final

from src.core.outputs import Embedding
from src.http.embeddings.inputs import (
    given_inputs,
    input_names,
    pooled_options,
    renaming,
)
from src.http.embeddings.vectors import (
    held_numbers,
    json_base64,
    json_items,
    json_numbers,
    vector_size,
)
from src.http.generation.sampling import check_neutral
from src.http.protocol.embeddings import (
    NEUTRAL_IN_EMBEDDINGS,
    EmbeddingBody,
    EmbeddingRequest,
    EmbeddingUsage,
)
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder
from src.http.server.state import adapter_name, served_name

_decode: Final = RequestDecoder(EmbeddingRequest)
_PREFIX: Final = "embd-"


async def create_embeddings(call: Call) -> None:
    """The vectors of one text or of many, or of a conversation."""
    request = _decode(call)
    check_neutral(request, NEUTRAL_IN_EMBEDDINGS)
    engine = await call.admitted_engine()
    name = served_name(engine, request.model)
    texts = await given_inputs(call, engine, request)
    num_texts, in_base64 = len(texts), request.encoding_format == "base64"
    made = engine.embed(
        texts,
        dimensions=request.dimensions,
        truncate=request.truncate_prompt_tokens,
        add_special_tokens=request.add_special_tokens is not False,
        prompt_name=request.prompt_name,
        admission=call.admission,
        **pooled_options(
            call,
            answer_id=f"{_PREFIX}{call.id}",
            model=name,
            lora=adapter_name(engine, name),
            priority=request.priority,
            timeout=request.timeout,
            cache_salt=request.cache_salt,
        ),
    )
    count = num_texts * vector_size(engine, request.dimensions)
    names = input_names(request)
    # The texts are token ids before long, and answers may take long.
    del texts, request
    with contextlib.closing(made), renaming(names), held_numbers(call, num_texts, count):
        embeddings = await made
        await call.answer_in_pieces(_pieces(call.id, name, embeddings, in_base64=in_base64))


def _pieces(
    request_id: str, model: str, embeddings: list[Embedding], *, in_base64: bool
) -> Iterator[bytes]:
    """The answer, each piece made when it is asked for."""
    prompt_tokens = sum(each.prompt_tokens for each in embeddings)
    body = EmbeddingBody(
        id=f"{_PREFIX}{request_id}",
        created=int(time.time()),
        model=model,
        data=[],
        usage=EmbeddingUsage(prompt_tokens, prompt_tokens),
    )
    encode = json_base64 if in_base64 else json_numbers

    def item(index: int, embedding: Embedding) -> Iterator[bytes]:
        yield b'{"object":"embedding","index":%d,"embedding":' % index
        yield from encode(embedding.numbers)
        yield b"}"

    return json_items(body, b"data", itertools.starmap(item, enumerate(embeddings)))
