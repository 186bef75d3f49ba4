"""Threads that follow many grammars in one call, and what that takes of their time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher

from src.core.cpus import usable_cpus
from src.engine.structured.compiled import ORDINARY_CALL

# More do not help: a batch's masks are some tens of microseconds each.
_MAX_THREADS: Final = 4
# So many take their tokens, a microsecond or two each, sooner than another thread begins to; but
# with the interpreter lock, so for so many seconds at most.
_FEW: Final = 64
_LOCKED: Final = 0.0005
# Seconds of each matcher in a call for many that are nothing to wonder at.
_ORDINARY_SHARE: Final = 20e-6
# A thread's processor time, by Linux's way to spell that: clock_getcpuclockid(3) for thread ids.
_THREAD_CLOCK: Final = 0b110


class MatcherPool:
    """Threads for calls of many matchers at a time; used by one thread."""

    def __init__(self) -> None:
        before = _thread_ids()
        cpus = usable_cpus()
        self._executor = LLExecutor(num_threads=max(1, min(_MAX_THREADS, cpus // 2)))
        # Those that others began meanwhile may be among them, and make calls look longer.
        self._clocks = [~number << 3 | _THREAD_CLOCK for number in _thread_ids() - before]

    def follow(self, moves: Sequence[tuple[LLMatcher, int, int]], masks: np.ndarray) -> bool:
        """Let each matcher take a token, and compute its next mask into a row of ``masks``.

        Parameters
        ----------
        moves
            Matcher, token and row.
        masks
            [R, W] int32.

        Returns
        -------
        bool
            Whether that was as quick as it should be.
        """
        started = self._seconds()
        left = [(matcher, token_id) for matcher, token_id, _ in moves]
        if len(left) <= _FEW:
            self._consume_here(left)
        if left:
            self._executor.consume_token_par(left)
        self._compute([(matcher, row) for matcher, _, row in moves], masks)
        return self._is_ordinary(started, 2, len(moves))

    def compute(self, matchers: Sequence[tuple[LLMatcher, int]], masks: np.ndarray) -> bool:
        """Compute the masks of matchers that took no token; as above."""
        started = self._seconds()
        self._compute(list(matchers), masks)
        return self._is_ordinary(started, 1, len(matchers))

    def _consume_here(self, moves: list[tuple[LLMatcher, int]]) -> None:
        """Take moves from the list, for as long as nobody minds that this has the lock."""
        until = time.monotonic() + _LOCKED
        moves.reverse()
        while moves and time.monotonic() < until:
            matcher, token_id = moves.pop()
            matcher.consume_token(token_id)

    def _compute(self, matchers: list[tuple[LLMatcher, int]], masks: np.ndarray) -> None:
        num_rows, words = masks.shape
        self._executor.unsafe_compute_mask_ptr(
            matchers, masks.ctypes.data, words * masks.itemsize, num_rows
        )

    def _is_ordinary(self, started: float, num_calls: int, num_matchers: int) -> bool:
        ordinary = ORDINARY_CALL + num_matchers * _ORDINARY_SHARE
        return self._seconds() - started <= num_calls * ordinary

    def _seconds(self) -> float:
        """Processor time of the threads: a machine that is busy with other things slows nobody."""
        if not self._clocks:
            return time.monotonic()
        try:
            # The caller's too: what is to be done for one alone is done there.
            return time.thread_time() + sum(map(time.clock_gettime, self._clocks))
        except OSError:
            # One of them was another's, and has ended. It may have been the last.
            self._clocks = list(filter(_ticks, self._clocks))
            return self._seconds()


def _ticks(clock: int) -> bool:
    try:
        time.clock_gettime(clock)
    except OSError:
        return False
    return True


def _thread_ids() -> set[int]:
    try:
        return set(map(int, os.listdir("/proc/self/task")))
    # Another system: it is judged by the clock on the wall.
    except OSError:
        return set()
