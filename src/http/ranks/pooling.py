"""``POST /pooling``: what a model gives for texts, as it comes."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Final

from src.core.errors import InvalidRequestError
from src.core.outputs import Embedding, Encoding
from src.core.task import Task
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
    num_labels,
    vector_size,
)
from src.http.generation.sampling import check_neutral
from src.http.protocol.embeddings import EmbeddingUsage
from src.http.protocol.ranks import NEUTRAL_IN_RANKS, PoolingBody, PoolingRequest
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder
from src.http.server.state import adapter_name, served_name

_decode: Final = RequestDecoder(PoolingRequest)

# In the order in which one is chosen where a request does not say.
_TASKS: Final[tuple[Task, ...]] = ("embed", "classify", "token_embed", "token_classify")
_NUMBER: Final = 4
_PREFIX: Final = "pool-"


async def pool(call: Call) -> None:
    """Vectors or labels of texts, or of each of their tokens."""
    request = _decode(call)
    check_neutral(request, NEUTRAL_IN_RANKS)
    engine = await call.admitted_engine()
    name = served_name(engine, request.model)
    does = frozenset(engine.model_info.tasks)
    task: Task = "embed"
    if request.task is not None:
        task = request.task
    elif not does.isdisjoint(_TASKS):
        task = next(each for each in _TASKS if each in does)
    _check(request, task)
    texts = await given_inputs(call, engine, request)
    num_texts, in_base64 = len(texts), request.encoding_format == "base64"
    options = pooled_options(
        call,
        answer_id=f"{_PREFIX}{call.id}",
        model=name,
        lora=adapter_name(engine, name),
        priority=request.priority,
        timeout=request.timeout,
        cache_salt=request.cache_salt,
    )
    truncate, adds = request.truncate_prompt_tokens, request.add_special_tokens is not False
    with contextlib.ExitStack() as stack:
        stack.enter_context(renaming(input_names(request)))

        def hold(count: int) -> None:
            stack.enter_context(held_numbers(call, num_texts, count))

        if task == "embed":
            hold(num_texts * vector_size(engine, request.dimensions))
            vectors = engine.embed(
                texts,
                dimensions=request.dimensions,
                truncate=truncate,
                add_special_tokens=adds,
                normalize=request.use_activation,
                admission=call.admission,
                **options,
            )
            del texts, request
            pieces = _pieces(call.id, name, await vectors, in_base64=in_base64)
        else:
            if task == "classify":
                hold(num_texts * num_labels(engine))
            arrays = engine.encode(
                texts,
                task=task,
                use_activation=request.use_activation,
                max_values=call.server.config.http.max_embedding_values,
                # How many numbers tokens have is known once there are tokens.
                on_counted=None if task == "classify" else hold,
                truncate=truncate,
                add_special_tokens=adds,
                admission=call.admission,
                **options,
            )
            del texts, request
            pieces = _pieces(call.id, name, await arrays, in_base64=in_base64)
        await call.answer_in_pieces(pieces)


def _check(request: PoolingRequest, task: Task) -> None:
    """Refuse fields that have no meaning for a task.

    Raises
    ------
    InvalidRequestError
        Names the field.
    """
    if request.dimensions is not None and task != "embed":
        raise InvalidRequestError(
            f"dimensions may only be given with task = embed, got {task}", param="dimensions"
        )


def _pieces(
    request_id: str,
    model: str,
    found: Sequence[Embedding] | Sequence[Encoding],
    *,
    in_base64: bool,
) -> Iterator[bytes]:
    """The answer, each piece made when it is asked for."""
    tokens = sum(each.prompt_tokens for each in found)
    body = PoolingBody(
        id=f"{_PREFIX}{request_id}",
        created=int(time.time()),
        model=model,
        data=[],
        usage=EmbeddingUsage(tokens, tokens),
    )

    def item(index: int, each: Embedding | Encoding) -> Iterator[bytes]:
        yield b'{"index":%d,"object":"pooling","data":' % index
        if in_base64:
            yield from json_base64(each.numbers)
        elif isinstance(each, Encoding) and len(each.shape) > 1:
            yield from _rows(each)
        else:
            yield from json_numbers(each.numbers)
        yield b"}"

    return json_items(body, b"data", itertools.starmap(item, enumerate(found)))


def _rows(encoding: Encoding) -> Iterator[bytes]:
    """A list for each token."""
    size = _NUMBER * encoding.shape[1]
    for start in range(0, len(encoding.numbers), size):
        yield b"," if start else b"["
        yield from json_numbers(encoding.numbers[start : start + size])
    yield b"]"
