"""What is slow is noticed, whichever thread of the library's does it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from src.engine.structured import matcher_pool
from src.engine.structured.compiled import ORDINARY_CALL
from src.engine.structured.matcher_pool import MatcherPool


class Executor:
    """The library's: one matcher is followed by the caller, more by a thread of its own."""

    def __init__(self, num_threads: int) -> None:
        self.seconds = 0.0
        self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._asked.acquire()
            self._work()
            self._done.release()

    def _work(self) -> None:
        started = time.thread_time()
        while time.thread_time() - started < self.seconds:
            pass

    def _call(self, matchers: list[Any]) -> None:
        if len(matchers) == 1:
            self._work()
            return
        self._asked.release()
        # Waiting, as for a busy machine, is no work.
        time.sleep(2 * ORDINARY_CALL)
        self._done.acquire()

    def consume_token_par(self, moves: list[Any]) -> None:
        self._call(moves)

    def unsafe_compute_mask_ptr(self, matchers: list[Any], *masks: int) -> None:
        self._call(matchers)


class Matcher:
    """One of few that take their tokens one after the other."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def consume_token(self, token_id: int) -> None:
        self._executor._work()


@pytest.mark.parametrize("num_matchers", [1, 2, 5, 100])
@pytest.mark.parametrize("call", ["follow", "compute"])
def test_slow_calls_are_told_from_quick_ones(
    call: str, num_matchers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher_pool, "LLExecutor", Executor)
    pool = MatcherPool()
    executor: Any = pool._executor
    matchers: list[Any] = [Matcher(executor) for _ in range(num_matchers)]
    masks = np.zeros((1, 2), np.int32)
    calls: dict[str, Callable[[], bool]] = {
        "follow": lambda: pool.follow([(matcher, 7, 0) for matcher in matchers], masks),
        "compute": lambda: pool.compute([(matcher, 0) for matcher in matchers], masks),
    }
    assert calls[call]()
    # Beyond what so many may take, in one call or in each.
    executor.seconds = 5 * ORDINARY_CALL
    assert not calls[call]()
    executor.seconds = 0.0
    assert calls[call]()


def test_many_tokens_at_once_do_not_keep_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slow is left to the library, which gives the interpreter lock away."""
    monkeypatch.setattr(matcher_pool, "LLExecutor", Executor)
    pool = MatcherPool()
    executor: Any = pool._executor
    executor.seconds = matcher_pool._LOCKED
    here: list[int] = []
    there: list[Any] = []
    monkeypatch.setattr(
        Matcher, "consume_token", lambda _, token: (executor._work(), here.append(token))
    )
    executor.consume_token_par = there.extend
    matchers = [Matcher(executor) for _ in range(9)]
    pool.follow(
        [(matcher, token, 0) for token, matcher in enumerate(matchers)], np.zeros((1, 2), np.int32)
    )
    assert here == [0]
    assert sorted(token for _, token in there) == list(range(1, 9))


def test_the_clock_of_a_thread_that_has_ended_is_forgotten() -> None:
    pool = MatcherPool()
    clocks = list(pool._clocks)
    pool._clocks.append(~(2**22 - 3) << 3 | 0b110)
    assert pool._seconds() < time.monotonic() or not clocks
    assert pool._clocks == clocks
