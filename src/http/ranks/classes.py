"""``POST /classify``, and ``/predict`` as text-embeddings-inference has it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from src.core.errors import InvalidRequestError
from src.core.outputs import Classification
from src.http.embeddings.inputs import (
    given_inputs,
    input_names,
    pooled_options,
    renaming,
)
from src.http.embeddings.vectors import held_numbers, json_items, json_numbers, num_labels
from src.http.generation.sampling import check_neutral
from src.http.protocol.embeddings import EmbeddingUsage
from src.http.protocol.inference import NEUTRAL_IN_PREDICTIONS
from src.http.protocol.ranks import (
    NEUTRAL_IN_RANKS,
    ClassifyBody,
    ClassifyRequest,
    Prediction,
    PredictRequest,
)
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder
from src.http.server.state import adapter_name, served_name

_decode_classify: Final = RequestDecoder(ClassifyRequest)
_decode_predict: Final = RequestDecoder(PredictRequest)
_encode: Final = msgspec.json.Encoder().encode
_PREFIX: Final = "classify-"
# Labels of a text that are encoded at once.
_BLOCK: Final = 2048


async def classify(call: Call) -> None:
    """The probabilities of the model's labels, of one text or of many."""
    request = _decode_classify(call)
    check_neutral(request, NEUTRAL_IN_RANKS)
    engine = await call.admitted_engine()
    name = served_name(engine, request.model)
    texts = await given_inputs(call, engine, request)
    made = engine.classify(
        texts,
        use_activation=request.use_activation is not False,
        truncate=request.truncate_prompt_tokens,
        add_special_tokens=request.add_special_tokens is not False,
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
    num_texts, count = len(texts), len(texts) * num_labels(engine)
    names = input_names(request)
    del texts, request
    with contextlib.closing(made), renaming(names), held_numbers(call, num_texts, count):
        await call.answer_in_pieces(_pieces(call.id, name, await made))


def _pieces(request_id: str, model: str, found: Sequence[Classification]) -> Iterator[bytes]:
    """The answer, each piece made when it is asked for."""
    tokens = sum(each.prompt_tokens for each in found)
    body = ClassifyBody(
        id=f"{_PREFIX}{request_id}",
        created=int(time.time()),
        model=model,
        data=[],
        usage=EmbeddingUsage(tokens, tokens),
    )

    def item(index: int, each: Classification) -> Iterator[bytes]:
        yield b'{"index":%d,"label":%b,"probs":' % (index, _encode(each.label))
        yield from json_numbers(each.numbers)
        yield b',"num_classes":%d}' % len(each.labels)

    return json_items(body, b"data", itertools.starmap(item, enumerate(found)))


async def predict(call: Call) -> None:
    """The labels of one text or of many, each with its probability, likeliest first."""
    request = _decode_predict(call)
    check_neutral(request, NEUTRAL_IN_PREDICTIONS)
    engine = await call.admitted_engine()
    texts, is_batch = _inputs(request, call.server.config.http.max_embedding_inputs)
    made = engine.classify(
        texts,
        use_activation=not request.raw_scores,
        truncate=-1 if request.truncate else None,
        admission=call.admission,
        **pooled_options(call, timeout=request.timeout),
    )
    num_texts, count = len(texts), len(texts) * num_labels(engine)
    del texts, request
    with (
        contextlib.closing(made),
        renaming({"input": "inputs"}),
        held_numbers(call, num_texts, count, field="inputs"),
    ):
        found = await made
        pieces = _all_predictions(found) if is_batch else _predictions(found[0])
        await call.answer_in_pieces(pieces)


def _inputs(request: PredictRequest, most: int) -> tuple[list[str], bool]:
    """The texts, and whether the answer is a list of what one of them gets.

    Raises
    ------
    InvalidRequestError
        There is none, there are more than ``most``, two belong together, or a list mixes kinds.
    """
    given = request.inputs
    if given is None:
        raise InvalidRequestError("missing required field `inputs`", param="inputs")
    if isinstance(given, str):
        return [given], False
    if not given:
        raise InvalidRequestError("inputs must not be an empty list", param="inputs")
    if len(given) > most:
        raise InvalidRequestError(
            f"inputs may have at most {most} entries, got {len(given)}", param="inputs"
        )
    if all(isinstance(each, str) for each in given):
        return [_only(given)], False
    if not all(isinstance(each, list) for each in given):
        raise InvalidRequestError(
            "inputs must be a text, or a list of lists of a text, got a mixed list", param="inputs"
        )
    return [_only(each) for each in given], True


def _only(texts: Sequence[str | list[str]]) -> str:
    """The text of a list of one. Two belong together: those are scored.

    Raises
    ------
    InvalidRequestError
        There is another number of them.
    """
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    raise InvalidRequestError(
        f"inputs: a list of texts has one, got {len(texts)}; how well two match is a matter of "
        "/score and /rerank",
        param="inputs",
    )


def _all_predictions(found: Sequence[Classification]) -> Iterator[bytes]:
    for index, each in enumerate(found):
        yield b"," if index else b"["
        yield from _predictions(each)
    yield b"]"


def _predictions(found: Classification) -> Iterator[bytes]:
    """The JSON list of what one text gets, in pieces."""
    probs, labels = found.probs, found.labels
    order = found.likeliest_first()
    yield b"["
    for start in range(0, len(order), _BLOCK):
        made = [Prediction(probs[label], labels[label]) for label in order[start : start + _BLOCK]]
        yield (b"," if start else b"") + _encode(made)[1:-1]
    yield b"]"
