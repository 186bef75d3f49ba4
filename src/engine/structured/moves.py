"""Moves of matchers: each takes a token and computes the mask that follows, many in one call."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Final, NamedTuple, cast

from llguidance import LLMatcher

from src.engine.structured.compiled import ORDINARY_CALL
from src.engine.structured.masks import MaskTable
from src.engine.structured.shared import SharedMatcher, c_interface, num_lanes
from src.ops.cpu.build import kernel_library

NO_TOKEN: Final = -1

# Microseconds of a move, and for each token of the vocabulary; and those that are worth a thread.
_MOVE_COST: Final = 10.0
_TOKEN_COST: Final = 1e-3
_WORTH_A_THREAD: Final = 1000.0


class Outcome(IntEnum):
    """What became of a move, as of the kernel library (abi.h)."""

    MOVED = 0
    MATCHER_FAILED = 1
    NOTHING_POSSIBLE = 2
    COMPLETE = 3


class Move(NamedTuple):
    """A matcher, its row, and the token that it takes; `NO_TOKEN` if only the mask is wanted."""

    matcher: SharedMatcher | LLMatcher
    row: int
    token_id: int


class Made(NamedTuple):
    """How many moves were made, and what became of the last one."""

    num_moves: int
    outcome: int
    seconds: float


class Mover:
    """Makes moves, and leaves masks in a table; used by one thread.

    Parameters
    ----------
    table
        Where masks are left, with what else their requests want.
    vocab_size
        Of the masks.
    """

    def __init__(self, table: MaskTable, vocab_size: int) -> None:
        self._table = table
        self._cost = _MOVE_COST + vocab_size * _TOKEN_COST
        self._num_lanes = num_lanes()
        self._pool: ThreadPoolExecutor | None = None
        self._compiled: Callable[[array[int]], tuple[int, int, float]] | None = None

    def can_share(self) -> bool:
        """Whether it can move matchers that share their lexer."""
        if self._compiled is None:
            library, kernels = c_interface(), kernel_library()
            if library is None or kernels is None:
                return False
            self._compiled = kernels.bind_moves(
                library.matcher_functions, self._table.arrays, ORDINARY_CALL
            )
        return True

    def lane(self, row: int) -> int:
        """Which lane's matcher a row is to have: lanes move side by side."""
        return row % self._num_lanes

    def move(self, moves: Sequence[Move]) -> list[tuple[Sequence[Move], Made]]:
        """Make moves of different rows, in parts.

        Each part is made up to the first move that has another outcome than ``MOVED`` or takes
        longer than ``ORDINARY_CALL``; what is behind it has not been made. Returns parts with what
        was made.
        """
        parts = self._parts(moves)
        if len(parts) == 1:
            return [(moves, self._make(moves))]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_lanes, "slipstream-masks")
        first, *rest = parts
        others = [self._pool.submit(self._make, part) for part in rest]
        made = [self._make(first), *(other.result() for other in others)]
        return list(zip(parts, made, strict=True))

    def close(self) -> None:
        """Stop its threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _parts(self, moves: Sequence[Move]) -> list[Sequence[Move]]:
        """By lane, if that is worth while, and those that share apart from those that do not."""
        shares = [isinstance(move.matcher, SharedMatcher) for move in moves]
        if self._num_lanes == 1 or len(moves) * self._cost < _WORTH_A_THREAD:
            if len(set(shares)) == 1:
                return [moves]
            num_lanes = 1
        else:
            num_lanes = self._num_lanes
        parts: dict[tuple[bool, int], list[Move]] = {}
        for move, is_shared in zip(moves, shares, strict=True):
            parts.setdefault((is_shared, move.row % num_lanes), []).append(move)
        return list(parts.values())

    def _make(self, moves: Sequence[Move]) -> Made:
        if not isinstance(moves[0].matcher, SharedMatcher):
            return make_alone(moves, self._table)
        assert self._compiled is not None
        given = cast("Sequence[tuple[SharedMatcher, int, int]]", moves)
        numbers = [n for matcher, row, token in given for n in (matcher.address, row, token)]
        return Made._make(self._compiled(array("q", numbers)))


def make_alone(moves: Sequence[Move], table: MaskTable) -> Made:
    """The same for matchers of the Python interface, which share nothing."""
    made = Made(0, Outcome.MOVED, 0.0)
    for move in moves:
        started = time.thread_time()
        outcome = _make_one(move, table)
        made = Made(made.num_moves + 1, outcome, time.thread_time() - started)
        if outcome is not Outcome.MOVED or made.seconds > ORDINARY_CALL:
            break
    return made


def _make_one(move: Move, table: MaskTable) -> Outcome:
    matcher, row, token_id = move
    assert isinstance(matcher, LLMatcher)
    mask = table.masks[row]
    if token_id != NO_TOKEN:
        matcher.consume_token(token_id)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        return Outcome.MATCHER_FAILED
    return Outcome.MOVED if table.restrict([row]) is None else Outcome.NOTHING_POSSIBLE
