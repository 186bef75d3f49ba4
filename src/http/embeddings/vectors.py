"""Numbers in answers: how many one may have, and how they are written piece by piece.

Vectors, probabilities of labels and scores have the same bounds, and the same way into an answer.
"""

from __future__ import annotations

import base64
import contextlib
import sys
from array import array
from collections.abc import Iterator
from typing import Final

import msgspec

from src.core.errors import InvalidRequestError
from src.engine.client import AsyncEngine
from src.http.server.call import PIECE, Call
from src.http.server.held_answers import HeldAnswers

_encode: Final = msgspec.json.Encoder().encode
# Numbers that are encoded at once: well under a millisecond, and whole groups of base64.
_BLOCK: Final = 3 * 2048
# Bytes of a number, and roughly of what is around a result.
_NUMBER: Final = 4
_ENCODED: Final = 22  # as JSON
_AROUND: Final = 256


def vector_size(engine: AsyncEngine, dimensions: int | None = None) -> int:
    """Numbers of a text's vector; 0 where the model gives none, which is refused elsewhere."""
    recipe = engine.model_info.embedding
    return min(dimensions or recipe.size, recipe.size) if recipe else 0


def num_labels(engine: AsyncEngine) -> int:
    """Numbers of what a classifier says of a text; 0 where the model is none."""
    recipe = engine.model_info.labels
    return len(recipe.labels) if recipe else 0


@contextlib.contextmanager
def held_numbers(
    call: Call, num_results: int, count: int, *, others: int = 0, field: str = "input"
) -> Iterator[None]:
    """Count an answer's results, with ``count`` numbers together, until it is sent.

    ``others``: bytes beside them. ``field``: what the request calls its texts.

    Raises
    ------
    InvalidRequestError
        They are more numbers than an answer may have.
    QueueFullError
        The answers that wait for their readers leave no room for it, see `HeldAnswers.holding`.
    """
    http = call.server.config.http
    if count > (most := http.max_embedding_values):
        raise InvalidRequestError(
            f"the results of {num_results} texts are {count} numbers, an answer may have at most "
            f"{most} (http.max_embedding_values): ask for fewer texts at once",
            param=field,
        )
    # What has just been encoded, too.
    encoded = min(_ENCODED * count, 2 * PIECE)
    size = num_results * _AROUND + _NUMBER * count + encoded + others
    held, most = call.server.keep(HeldAnswers), http.max_held_vector_bytes
    with held.holding(size, call.tenant, most):
        yield


def json_numbers(numbers: bytes) -> Iterator[bytes]:
    """The JSON list of float32 numbers, in pieces."""
    values = memoryview(numbers).cast("f")
    for start in range(0, len(values), _BLOCK):
        yield (b"," if start else b"[") + _encode(values[start : start + _BLOCK].tolist())[1:-1]
    yield b"]" if len(values) else b"[]"


def json_base64(numbers: bytes) -> Iterator[bytes]:
    """The JSON text of float32 numbers in little-endian order, in pieces."""
    yield b'"'
    for start in range(0, len(numbers), _NUMBER * _BLOCK):
        block = numbers[start : start + _NUMBER * _BLOCK]
        if sys.byteorder == "big":
            swapped = array("f", block)
            swapped.byteswap()
            block = swapped.tobytes()
        yield base64.b64encode(block)
    yield b'"'


def json_items(
    body: msgspec.Struct, field: bytes, items: Iterator[Iterator[bytes]]
) -> Iterator[bytes]:
    """The JSON of a body with the items of one of its lists, which is empty, in pieces.

    Nothing before the list may be an empty list of the same name.
    """
    before, name, behind = _encode(body).partition(b'"%b":[' % field)
    yield before + name
    for index, item in enumerate(items):
        if index:
            yield b","
        yield from item
    yield behind
