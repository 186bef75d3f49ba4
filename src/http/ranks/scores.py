"""``POST /score`` and ``/v1/score``."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from src.core.errors import InvalidRequestError, RequestError
from src.core.outputs import Score
from src.http.embeddings.inputs import pooled_options, renamed
from src.http.embeddings.vectors import held_numbers, json_items
from src.http.generation.sampling import check_neutral
from src.http.protocol.embeddings import EmbeddingUsage
from src.http.protocol.ranks import (
    NEUTRAL_IN_RANKS,
    ScoreBody,
    ScoreItem,
    ScoreRequest,
    Texts,
)
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder
from src.http.server.state import adapter_name, served_name

_decode: Final = RequestDecoder(ScoreRequest)
_encode: Final = msgspec.json.Encoder().encode
_PREFIX: Final = "score-"

# What the engine calls a text that has a vector of its own.
_INPUT: Final = re.compile(r"\binput\b")
_PAIR: Final = re.compile(r"^pairs\[\d+\]: ")
# The names under which clients send both sides.
_SIDES: Final = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)


async def score(call: Call) -> None:
    """How well the texts of each pair match: one with one, or one with each of many."""
    request = _decode(call)
    check_neutral(request, NEUTRAL_IN_RANKS)
    engine = await call.admitted_engine()
    name = served_name(engine, request.model)
    first, second = _names(request)
    pairs = _pairs(request, first, second, call.server.config.http.max_embedding_inputs)
    one_query = len({query for query, _ in pairs}) == 1
    made = engine.score(
        pairs,
        use_activation=request.use_activation is not False,
        truncate=request.truncate_prompt_tokens,
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
    num_pairs = len(pairs)
    del pairs, request
    with contextlib.closing(made), held_numbers(call, num_pairs, num_pairs, field=second):
        try:
            scores = await made
        except RequestError as error:
            raise with_sides(error, first, second, one_query=one_query) from None
        await call.answer_in_pieces(_pieces(call.id, name, scores))


def _pieces(request_id: str, model: str, scores: Sequence[Score]) -> Iterator[bytes]:
    """The answer, each piece made when it is asked for."""
    tokens = sum(each.prompt_tokens for each in scores)
    body = ScoreBody(
        id=f"{_PREFIX}{request_id}",
        created=int(time.time()),
        model=model,
        data=[],
        usage=EmbeddingUsage(tokens, tokens),
    )

    def item(index: int) -> Iterator[bytes]:
        yield _encode(ScoreItem(index=index, score=scores[index].score))

    return json_items(body, b"data", map(item, range(len(scores))))


def check_texts(texts: Sequence[str], field: str) -> None:
    """Refuse an empty text.

    Raises
    ------
    InvalidRequestError
        Names it.
    """
    for index, text in enumerate(texts):
        if not text:
            where = f"{field}[{index}]" if len(texts) > 1 else field
            raise InvalidRequestError(f"{where} must not be empty", param=field)


def with_sides(
    error: RequestError, first: str, second: str, *, one_query: bool = True
) -> RequestError:
    """The same error, with the two texts of a pair as the request names them.

    ``one_query``: all pairs have the same first text, so that it has no index.
    """
    name = first if error.param == "query" else second
    if error.param == "query" and one_query:
        error.message = _PAIR.sub("", error.message)
    error.message = error.message.replace("pairs[", f"{name}[", 1)
    error.message = _INPUT.sub(name, error.message)
    error.args = (error.message,)
    return renamed(error, {"query": first, "document": second, "pairs": second})


def _names(request: ScoreRequest) -> tuple[str, str]:
    """What the request calls its two sides.

    Raises
    ------
    InvalidRequestError
        A side is missing, or there are sides of several names.
    """
    names = dict.fromkeys(name for sides in _SIDES for name in sides)
    given = [name for name in names if getattr(request, name) is not None]
    for sides in _SIDES:
        if set(sides) == set(given):
            return sides
    for sides in _SIDES:
        if len(given) == 1 and given[0] in sides:
            missing = sides[1 - sides.index(given[0])]
            raise InvalidRequestError(f"missing required field `{missing}`", param=missing)
    if not given:
        raise InvalidRequestError("missing required field `text_1`", param="text_1")
    known = ", ".join(f"{first} and {second}" for first, second in _SIDES)
    raise InvalidRequestError(
        f"the two sides are one of {known}, got {', '.join(given)}", param=given[-1]
    )


def _pairs(request: ScoreRequest, first: str, second: str, most: int) -> list[tuple[str, str]]:
    """The pairs: one text with each of many, or as many with as many.

    Raises
    ------
    InvalidRequestError
        There is none, there are more than ``most``, or the sides differ in their numbers.
    """
    sides: list[list[str]] = []
    for name in (first, second):
        given: Texts = getattr(request, name)
        texts = [given] if isinstance(given, str) else given
        if not texts:
            raise InvalidRequestError(f"{name} must not be an empty list", param=name)
        if len(texts) > most:
            raise InvalidRequestError(
                f"{name} may have at most {most} entries, got {len(texts)}", param=name
            )
        check_texts(texts, name)
        sides.append(texts)
    firsts, seconds = sides
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequestError(
            f"{first} has {len(firsts)} texts and {second} {len(seconds)}: they must be as many, "
            f"or {first} one",
            param=second,
        )
    return list(zip(firsts, seconds, strict=True))
