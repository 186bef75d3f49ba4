"""``POST /rerank``, ``/v1/rerank`` and ``/v2/rerank``.

Cohere's, Jina's and vLLM's requests have ``documents``; text-embeddings-inference's have ``texts``,
and get its answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from src.core.errors import InvalidRequestError, RequestError
from src.core.outputs import Score
from src.http.embeddings.inputs import pooled_options
from src.http.embeddings.vectors import held_numbers, json_items
from src.http.generation.sampling import check_neutral
from src.http.protocol.cohere import BilledUnits, CohereMeta
from src.http.protocol.embeddings import EmbeddingUsage
from src.http.protocol.ranks import (
    NEUTRAL_IN_RANKS,
    Rank,
    RerankBody,
    RerankDocument,
    RerankRequest,
    RerankResult,
)
from src.http.ranks.scores import check_texts, with_sides
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder
from src.http.server.state import adapter_name, served_name

_decode: Final = RequestDecoder(RerankRequest)
_encode: Final = msgspec.json.Encoder().encode

# Fields of each of the two protocols alone.
_OF_DOCUMENTS: Final = ("top_n", "return_documents", "max_tokens_per_doc")
_OF_TEXTS: Final = ("raw_scores", "return_text", "truncate")

_PREFIX: Final = "rerank-"


async def rerank(call: Call) -> None:
    """The documents that match a query best, with their texts."""
    await _rerank(call, shows_documents=True)


async def rerank_for_cohere(call: Call) -> None:
    """The documents that match a query best."""
    await _rerank(call, shows_documents=False)


async def _rerank(call: Call, *, shows_documents: bool) -> None:
    request = _decode(call)
    check_neutral(request, NEUTRAL_IN_RANKS)
    engine = await call.admitted_engine()
    name = served_name(engine, request.model)
    field = _check_protocol(request)
    most = call.server.config.http.max_embedding_inputs
    texts = _texts(request, field, most)
    if request.query is None:
        raise InvalidRequestError("missing required field `query`", param="query")
    check_texts([request.query], "query")
    check_texts(texts, field)
    if request.return_documents is not None:
        shows_documents = request.return_documents
    if field == "texts":
        shows_documents = bool(request.return_text)
    activates = request.use_activation is not False and not request.raw_scores
    top_n = len(texts) if request.top_n is None else request.top_n
    made = engine.score(
        [(request.query, text) for text in texts],
        use_activation=activates,
        truncate=-1 if request.truncate else request.truncate_prompt_tokens,
        max_tokens_per_doc=request.max_tokens_per_doc,
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
    kept, num_texts = texts if shows_documents else None, len(texts)
    del texts, request
    # What is told of the documents is held until it is sent.
    others = call.body_size if shows_documents else 0
    with (
        contextlib.closing(made),
        held_numbers(call, num_texts, num_texts, others=others, field=field),
    ):
        try:
            scores = await made
        except RequestError as error:
            raise with_sides(error, "query", field) from None
        best = sorted(range(len(scores)), key=lambda index: (-scores[index].raw, index))
        if field == "texts":
            await call.answer_in_pieces(_ranks(best, scores, kept))
        else:
            await call.answer_in_pieces(_results(call.id, name, best[:top_n], scores, kept))


def _check_protocol(request: RerankRequest) -> str:
    """What the request calls its documents.

    Raises
    ------
    InvalidRequestError
        It has both, or none, a field of the other protocol, or two fields that say the same.
    """
    if request.texts is None and request.documents is None:
        raise InvalidRequestError("missing required field `documents`", param="documents")
    if request.texts is not None and request.documents is not None:
        raise InvalidRequestError("one of documents and texts is required", param="texts")
    field, others = "documents", _OF_TEXTS
    if request.texts is not None:
        field, others = "texts", _OF_DOCUMENTS
    for name in others:
        if getattr(request, name) is not None:
            raise InvalidRequestError(f"{name} may not be given with {field}", param=name)
    for own, other in (
        ("truncate", "truncate_prompt_tokens"),
        ("raw_scores", "use_activation"),
    ):
        if getattr(request, own) is not None and getattr(request, other) is not None:
            raise InvalidRequestError(f"{other} may not be given with {own}", param=other)
    return field


def _texts(request: RerankRequest, field: str, most: int) -> list[str]:
    given: Sequence[str | RerankDocument] | None = getattr(request, field)
    assert given is not None
    if not given:
        raise InvalidRequestError(f"{field} must not be an empty list", param=field)
    if len(given) > most:
        raise InvalidRequestError(
            f"{field} may have at most {most} entries, got {len(given)}", param=field
        )
    return [each if isinstance(each, str) else each.text for each in given]


def _results(
    request_id: str,
    model: str,
    best: Sequence[int],
    scores: Sequence[Score],
    texts: Sequence[str] | None,
) -> Iterator[bytes]:
    """The answer, each piece made when it is asked for."""
    tokens = sum(each.prompt_tokens for each in scores)
    body = RerankBody(
        id=f"{_PREFIX}{request_id}",
        model=model,
        results=[],
        usage=EmbeddingUsage(tokens, tokens),
        meta=CohereMeta(billed_units=BilledUnits(search_units=1)),
    )

    def item(index: int) -> Iterator[bytes]:
        document = None if texts is None else RerankDocument(texts[index])
        result = RerankResult(index=index, relevance_score=scores[index].score, document=document)
        yield _encode(result)

    return json_items(body, b"results", map(item, best))


def _ranks(
    best: Sequence[int], scores: Sequence[Score], texts: Sequence[str] | None
) -> Iterator[bytes]:
    for place, index in enumerate(best):
        text = None if texts is None else texts[index]
        rank = Rank(index=index, text=text, score=scores[index].score)
        yield (b"," if place else b"[") + _encode(rank)
    yield b"]"
