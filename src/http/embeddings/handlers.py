"""``POST /v1/embeddings``."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias, cast

import msgspec

from src.core.config import HttpSection
from src.core.errors import InvalidRequestError
from src.core.outputs import Embedding
from src.engine.client import AsyncEngine
from src.http.generation.sampling import check_neutral, unsupported
from src.http.protocol.embeddings import (
    NEUTRAL_IN_EMBEDDINGS,
    EmbeddingBody,
    EmbeddingItem,
    EmbeddingRequest,
    EmbeddingUsage,
)
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder
from src.http.server.state import adapter_name, served_name

Text: TypeAlias = str | list[int]

_decode: Final = RequestDecoder(EmbeddingRequest)
_encode: Final = msgspec.json.Encoder().encode
# Vectors that are encoded between two turns of the event loop.
_PER_TURN: Final = 16


async def create_embeddings(call: Call) -> None:
    """The vectors of one text or of many."""
    request = _decode(call)
    check_neutral(request, NEUTRAL_IN_EMBEDDINGS)
    if request.input is None:
        raise InvalidRequestError("missing required field `input`", param="input")
    engine = await call.admitted_engine()
    name = served_name(engine, request.model)
    if adapter_name(engine, name) is not None:
        raise unsupported("model", ": adapters do not embed")
    texts = _texts(request.input, call.server.config.http.max_embedding_inputs)
    _check_values(engine, len(texts), request.dimensions, call.server.config.http)
    embeddings = await engine.embed(
        texts,
        dimensions=request.dimensions,
        truncate=request.truncate_prompt_tokens,
        add_special_tokens=request.add_special_tokens is not False,
        prompt_name=request.prompt_name,
        admission=call.admission,
        request_id=call.id,
        priority=request.priority or 0,
        timeout=call.timeout(request.timeout, call.server.config.http.request_timeout),
        cache_salt=request.cache_salt or "",
        tenant=call.tenant,
    )
    del texts
    await call.answer(*await _body(call.id, name, request, embeddings))


def _texts(given: str | list[int | str | list[int]], most: int) -> Sequence[Text]:
    """The texts of a request: a text and a list of token ids are one, other lists are several.

    Raises
    ------
    InvalidRequestError
        There is none, there are more than ``most``, or a list mixes kinds.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError("input must not be an empty list", param="input")
    kind = type(given[0])
    if kind is not int and len(given) > most:
        raise InvalidRequestError(
            f"input may have at most {most} entries, got {len(given)}", param="input"
        )
    if set(map(type, given)) != {kind}:
        raise InvalidRequestError(
            "input must be a string, a list of token ids, a list of strings or a list of lists of "
            "token ids, got a mixed list",
            param="input",
        )
    return [cast(list[int], given)] if kind is int else cast(list[Text], given)


def _check_values(
    engine: AsyncEngine, num_texts: int, dimensions: int | None, http: HttpSection
) -> None:
    """Refuse an answer that would take too much memory until it is sent.

    Raises
    ------
    InvalidRequestError
        The vectors have too many numbers.
    """
    recipe = engine.model_info.embedding
    size = min(dimensions or recipe.size, recipe.size) if recipe else 0
    if num_texts * size > (most := http.max_embedding_values):
        raise InvalidRequestError(
            f"{num_texts} vectors of {size} numbers are {num_texts * size} numbers, an answer may "
            f"have at most {most} (http.max_embedding_values): ask for fewer texts at once",
            param="input",
        )


async def _body(
    request_id: str, model: str, request: EmbeddingRequest, embeddings: list[Embedding]
) -> list[bytes]:
    """The answer in pieces: a long one is not made in one turn of the event loop."""
    prompt_tokens = sum(each.prompt_tokens for each in embeddings)
    body = EmbeddingBody(
        id=f"embd-{request_id}",
        created=int(time.time()),
        model=model,
        data=[],
        usage=EmbeddingUsage(prompt_tokens, prompt_tokens),
    )
    before, _, behind = _encode(body).partition(b'"data":[')
    pieces = [before, b'"data":[']
    as_text = request.encoding_format == "base64"
    for start in range(0, len(embeddings), _PER_TURN):
        items = [
            EmbeddingItem(
                index=index,
                embedding=_in_base64(each.vector) if as_text else each.vector,
            )
            for index, each in enumerate(embeddings[start : start + _PER_TURN], start)
        ]
        pieces.append((b"," if start else b"") + _encode(items)[1:-1])
        await asyncio.sleep(0)
    return [*pieces, behind]


def _in_base64(vector: list[float]) -> str:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
