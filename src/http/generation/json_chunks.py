"""JSON of any length, made in pieces between which others get the event loop.

An answer with log-probabilities may have millions of them. So it is never one object and never one
text: a generator makes it piece by piece, and what several choices share is made once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

# Positions with log-probabilities that are encoded at once: at most a millisecond or two.
SLICE: Final = 16
# Seconds after which others get their turn.
_TURN: Final = 0.002

# Takes the place of what is encoded by itself; no JSON has such a byte.
_HOLE: Final = b"\0"

_encode: Final = msgspec.json.Encoder().encode

T = TypeVar("T")


class _Apart:
    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = pieces


def apart(pieces: Iterable[bytes]) -> Any:
    """A part of a value whose JSON is these pieces; only `json_chunks` can encode it."""
    return _Apart(pieces)


def json_chunks(value: object) -> Iterator[bytes]:
    """The JSON of a value, as chunks of bytes."""
    try:
        # Most have no part that is encoded by itself, and this takes a tenth of the time.
        return iter([_encode(value)])
    except TypeError:
        return _around_parts(value)


def _around_parts(value: object) -> Iterator[bytes]:
    parts: list[_Apart] = []

    def leave_out(part: Any) -> msgspec.Raw:
        assert isinstance(part, _Apart), f"{type(part).__name__} is no part of any answer"
        parts.append(part)
        return msgspec.Raw(_HOLE)

    first, *others = msgspec.json.Encoder(enc_hook=leave_out).encode(value).split(_HOLE)
    yield first
    for part, piece in zip(parts, others, strict=True):
        yield from part.pieces
        yield piece


def json_array(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """The JSON of a list, from that of its items."""
    yield b"["
    for index, pieces in enumerate(items):
        if index:
            yield b","
        yield from pieces
    yield b"]"


def sliced(
    values: Sequence[T], spell: Callable[[Sequence[T]], Sequence[object]]
) -> Iterator[bytes]:
    """The JSON of a list, of which ``spell`` makes a few items at a time."""
    return json_array(
        [_encode(spell(values[begin : begin + SLICE]))[1:-1]]
        for begin in range(0, len(values), SLICE)
    )


class Turn:
    """How long one task has had the event loop to itself."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether it is others' turn."""
        return time.perf_counter() - self._began > _TURN

    async def pass_on(self) -> None:
        """Let others have theirs."""
        await asyncio.sleep(0)
        self._began = time.perf_counter()


async def gathered(pieces: Iterable[bytes]) -> list[bytes]:
    """All pieces, made in turns with whatever else the event loop has to do."""
    made = []
    turn = Turn()
    for piece in pieces:
        made.append(piece)
        if turn.is_over:
            await turn.pass_on()
    return made
