"""What other threads post is taken on the event loop, in order, and nothing is left open."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from src.engine.execution.step_results import StepResults

pytestmark = pytest.mark.anyio

DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture(
    params=[
        "as the system can",
        "no eventfd",
        "too many files",
        "no readers",
        "no C",
        "no signal",
    ]
)
def loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no eventfd":
        monkeypatch.delattr(os, "eventfd", raising=False)
    if request.param == "too many files":
        monkeypatch.setattr(os, "eventfd", _raise(OSError(errno.EMFILE, "")), raising=False)
    if request.param == "no C":
        monkeypatch.setattr(ctypes, "PyDLL", _raise(OSError("no such library")))
    if request.param == "no signal":
        monkeypatch.setattr(
            "src.engine.execution.step_results._signaling", lambda: lambda event, value: -1
        )
    if request.param == "no readers":
        error = NotImplementedError()
        monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", _raise(error))
    return str(request.param)


def _raise(error: Exception) -> Callable[..., None]:
    def function(*_: object) -> None:
        raise error

    return function


class Taker:
    """Keeps what it takes, and wakes who waits for it; nothing else wakes the loop."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.threads: set[int] = set()
        self._changed = asyncio.Event()

    def take(self, number: int) -> None:
        if number < 0:
            raise ValueError(number)
        self.taken.append(number)
        self.threads.add(threading.get_ident())
        self._changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.taken) < count:
                self._changed.clear()
                await self._changed.wait()


async def test_all_is_taken_on_the_loop_in_its_order(loop_kind: str) -> None:
    taker = Taker()
    arrivals = StepResults(taker.take)
    arrivals.listen(asyncio.get_running_loop())
    arrivals.listen(asyncio.get_running_loop())

    def post(first: int) -> None:
        for number in range(first, first + 500):
            arrivals.post(number)

    for first in (0, 500):
        poster = threading.Thread(target=post, args=(first,))
        poster.start()
        await taker.until(first + 500)
        poster.join()
    assert taker.taken == list(range(1000))
    assert taker.threads == {threading.get_ident()}
    arrivals.close()


async def test_what_is_posted_quietly_waits_until_the_loop_is_told(loop_kind: str) -> None:
    taker = Taker()
    arrivals = StepResults(taker.take)
    arrivals.listen(asyncio.get_running_loop())
    # Nothing was posted, so nobody is told.
    arrivals.wake()
    arrivals.post(1, wakes=False)
    # A loop that has something to do may look, but nothing makes it.
    for _ in range(20):
        await asyncio.sleep(0)
    assert not taker.taken
    poster = threading.Thread(target=arrivals.wake)
    poster.start()
    await taker.until(1)
    poster.join()
    arrivals.post(2, wakes=False)
    arrivals.post(3)
    await taker.until(3)
    assert taker.taken == [1, 2, 3]
    arrivals.close()


async def test_one_that_cannot_be_taken_keeps_no_other_one_waiting(loop_kind: str) -> None:
    taker, told = Taker(), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    arrivals = StepResults(taker.take)
    arrivals.listen(loop)
    for number in (1, -2, 3):
        arrivals.post(number)
    await taker.until(2)
    assert taker.taken == [1, 3]
    assert [str(error) for error in told] == ["-2"]
    arrivals.close()


async def test_what_is_posted_before_the_end_is_taken(loop_kind: str) -> None:
    taker = Taker()
    arrivals = StepResults(taker.take)
    arrivals.listen(asyncio.get_running_loop())
    arrivals.post(1)
    arrivals.post(2)
    arrivals.close()
    await taker.until(2)
    assert taker.taken == [1, 2]


def test_a_loop_that_is_gone_takes_nothing(loop_kind: str) -> None:
    taken: list[int] = []
    arrivals = StepResults(taken.append)

    async def listen() -> None:
        arrivals.listen(asyncio.get_running_loop())

    asyncio.run(listen())
    arrivals.post(1)
    arrivals.close()
    assert not taken


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for descriptors")
def test_no_descriptor_stays_open() -> None:
    async def listen(closes: bool) -> StepResults[int]:
        arrivals = StepResults(taken.append)
        arrivals.listen(asyncio.get_running_loop())
        arrivals.post(1)
        if closes:
            arrivals.close()
        return arrivals

    taken: list[int] = []
    asyncio.run(listen(True))
    gc.collect()
    before = len(list(DESCRIPTORS.iterdir()))
    asyncio.run(listen(True))
    asyncio.run(listen(False))
    # The loop is gone by then.
    asyncio.run(listen(False)).close()
    gc.collect()
    assert len(list(DESCRIPTORS.iterdir())) == before
    assert taken[:2] == [1, 1]
