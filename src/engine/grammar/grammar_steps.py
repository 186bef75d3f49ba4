"""Advances many matchers in one call: each takes a token and computes the next mask."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from enum import IntEnum
from typing import Final, NamedTuple, Self

import numpy as np
from llguidance import LLMatcher

from src.engine.grammar.compiled import ORDINARY_CALL
from src.engine.grammar.constraints import Constraint, c_interface, num_lanes
from src.engine.grammar.masks import MaskTable
from src.ops.build.kernels import kernel_library

NO_TOKEN: Final = -1

# Estimated microseconds per matcher, and per token of the vocabulary; and how many justify threads.
_STEP_COST: Final = 10.0
_TOKEN_COST: Final = 1e-3
_WORTH_A_THREAD: Final = 1000.0


class Outcome(IntEnum):
    """The outcome of advancing one matcher; the kernel library's values (abi.h)."""

    ADVANCED = 0
    MATCHER_FAILED = 1
    NOTHING_POSSIBLE = 2
    COMPLETE = 3
    ENDED = 4


class Made(NamedTuple):
    """How many matchers were advanced, and the outcome and the duration of the last one."""

    num_steps: int
    outcome: int
    seconds: float


class GrammarSteps:
    """Matchers of different rows that one thread advances one after the other, and their tokens.

    Parameters
    ----------
    matchers, rows
        The matchers (all constraints, or all matchers of the Python interface) and their rows.
    entries
        Indices of their tokens among those of a batch.

    Attributes
    ----------
    numbers
        [M, 3] int64: address, row and token of each; `NO_TOKEN` if only the mask is wanted.
    """

    def __init__(
        self,
        matchers: Sequence[Constraint | LLMatcher],
        rows: Sequence[int],
        entries: Sequence[int],
    ) -> None:
        self.matchers = matchers
        self.rows = rows
        self.entries = np.array(entries, np.int64)
        self.numbers = np.full((len(rows), 3), NO_TOKEN, np.int64)
        self.numbers[:, 0] = [getattr(matcher, "address", 0) for matcher in matchers]
        self.numbers[:, 1] = rows

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, token_ids: np.ndarray) -> None:
        """Set the tokens from those of a batch, int64 [S]."""
        self.numbers[:, 2] = token_ids[self.entries]

    def only(self, chosen: Sequence[int]) -> Self:
        """A selection of them, with their tokens."""
        some = type(self)(
            [self.matchers[i] for i in chosen],
            [self.rows[i] for i in chosen],
            [int(self.entries[i]) for i in chosen],
        )
        some.numbers[:, 2] = self.numbers[list(chosen), 2]
        return some


class GrammarStepper:
    """Advances matchers, and writes their masks into a table. One thread uses it.

    Parameters
    ----------
    table
        Receives the masks, restricted by the requests' other parameters.
    vocab_size
        Width of the masks.
    """

    def __init__(self, table: MaskTable, vocab_size: int) -> None:
        self._table = table
        self._cost = _STEP_COST + vocab_size * _TOKEN_COST
        self._num_lanes = num_lanes()
        self._pool: ThreadPoolExecutor | None = None
        self._compiled: Callable[[np.ndarray], tuple[int, int, float]] | None = None

    def can_constrain(self) -> bool:
        """Whether constraints can be used: the C interface and the kernel library are available."""
        if self._compiled is None:
            library, kernels = c_interface(), kernel_library()
            if library is None or kernels is None:
                return False
            self._compiled = kernels.bind_grammar_steps(
                library.matcher_functions, self._table.arrays, ORDINARY_CALL
            )
        return True

    def lane(self, row: int) -> int:
        """The lane of a row. Lanes are advanced in parallel."""
        return row % self._num_lanes

    def prepare(
        self,
        matchers: Sequence[Constraint | LLMatcher],
        rows: Sequence[int],
        entries: Sequence[int],
    ) -> list[GrammarSteps]:
        """Group matchers for many steps: constraints and other matchers are separate.

        They are also split by lane, if there is enough work for several threads.
        """
        is_much = len(rows) * self._cost >= _WORTH_A_THREAD
        lanes = self._num_lanes if is_much else 1
        parts: dict[tuple[bool, int], list[int]] = {}
        for index, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            parts.setdefault((isinstance(matcher, Constraint), row % lanes), []).append(index)
        return [GrammarSteps(matchers, rows, entries).only(chosen) for chosen in parts.values()]

    def make(self, parts: Sequence[GrammarSteps]) -> list[Made]:
        """Advance matchers, the parts in parallel.

        Each part stops after the first matcher with another outcome than ``ADVANCED``, or that
        takes longer than ``ORDINARY_CALL``. The matchers behind it are not advanced.
        """
        first, *rest = parts
        if not rest:
            return [self._make(first)]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2 * self._num_lanes, "slipstream-masks")
        others = [self._pool.submit(self._make, part) for part in rest]
        try:
            return [self._make(first), *(other.result() for other in others)]
        finally:
            # Also after an error: no matcher may be in use when this returns.
            wait(others)

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _make(self, steps: GrammarSteps) -> Made:
        if isinstance(steps.matchers[0], LLMatcher):
            return make_by_python(steps, self._table)
        assert self._compiled is not None
        return Made._make(self._compiled(steps.numbers))


def make_by_python(steps: GrammarSteps, table: MaskTable) -> Made:
    """Advance matchers of the Python interface; see `GrammarStepper.make`."""
    made = Made(0, Outcome.ADVANCED, 0.0)
    tokens: list[int] = steps.numbers[:, 2].tolist()
    for matcher, row, token_id in zip(steps.matchers, steps.rows, tokens, strict=True):
        assert isinstance(matcher, LLMatcher)
        started = time.thread_time()
        outcome = _make_one(matcher, row, token_id, table)
        made = Made(made.num_steps + 1, outcome, time.thread_time() - started)
        if outcome is not Outcome.ADVANCED or made.seconds > ORDINARY_CALL:
            break
    return made


def _make_one(matcher: LLMatcher, row: int, token_id: int, table: MaskTable) -> Outcome:
    mask = table.masks[row]
    if token_id != NO_TOKEN:
        if table.ends(row, token_id):
            return Outcome.ENDED
        matcher.consume_token(token_id)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        return Outcome.MATCHER_FAILED
    return Outcome.ADVANCED if table.restrict([row]) is None else Outcome.NOTHING_POSSIBLE
