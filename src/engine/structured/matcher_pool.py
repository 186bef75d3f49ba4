"""Threads that follow many grammars in one call, and what that takes of their time."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher

from src.core.cpus import usable_cpus
from src.engine.structured.compiled import ORDINARY_CALL

# More do not help: a batch's masks are some tens of microseconds each.
_MAX_THREADS: Final = 4
# So many take their tokens, a microsecond or two each, sooner than another thread begins to.
_FEW: Final = 64
# Seconds of each matcher in a call for many that are nothing to wonder at.
_ORDINARY_SHARE: Final = 20e-6
# More than ours, of the library's threads. Their masks are wanted when a forward pass ends, and
# computed while it runs: by the CPUs that it leaves, since where it has to wait the step is longer.
_NICENESS: Final = 10
# A thread's processor time, by Linux's way to spell that: clock_getcpuclockid(3) for thread ids.
_THREAD_CLOCK: Final = 0b110


class MatcherPool:
    """Threads for calls of many matchers at a time; used by one thread."""

    def __init__(self) -> None:
        before = _thread_ids()
        cpus = usable_cpus()
        self._executor = LLExecutor(num_threads=max(1, min(_MAX_THREADS, cpus // 2)))
        # Those that others began meanwhile may be among them, and make calls look longer.
        threads = _thread_ids() - before
        self._clocks = [~number << 3 | _THREAD_CLOCK for number in threads]
        _give_way(threads)

    def consume(self, moves: Sequence[tuple[LLMatcher, int]]) -> bool:
        """Let each matcher take its token; whether that was as quick as it should be."""
        started = self._seconds()
        if len(moves) <= _FEW:
            for matcher, token_id in moves:
                matcher.consume_token(token_id)
        else:
            self._executor.consume_token_par(list(moves))
        return self._is_ordinary(started, len(moves))

    def compute(self, matchers: Sequence[tuple[LLMatcher, int]], masks: np.ndarray) -> bool:
        """Compute the mask of each matcher into its row of ``masks`` [R, W] int32; as above."""
        started = self._seconds()
        self._executor.unsafe_compute_mask_ptr(
            list(matchers), masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks)
        )
        return self._is_ordinary(started, len(matchers))

    def _is_ordinary(self, started: float, num_calls: int) -> bool:
        return self._seconds() - started <= ORDINARY_CALL + num_calls * _ORDINARY_SHARE

    def _seconds(self) -> float:
        """Processor time of the threads: a machine that is busy with other things slows nobody."""
        try:
            if self._clocks:
                # The caller's too: what is to be done for one alone is done there.
                return time.thread_time() + sum(map(time.clock_gettime, self._clocks))
            return time.monotonic()
        # One of them was another's, and has ended.
        except OSError:
            self._clocks = []
            return time.monotonic()


def _give_way(threads: Iterable[int]) -> None:
    """Let others have the CPUs first. Linux alone has a niceness for each thread."""
    if sys.platform != "linux":
        return
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, 19)
    for number in threads:
        # It may have ended, being another's after all; or somebody forbids it.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, number, niceness)


def _thread_ids() -> set[int]:
    try:
        return set(map(int, os.listdir("/proc/self/task")))
    # Another system: it is judged by the clock on the wall.
    except OSError:
        return set()
