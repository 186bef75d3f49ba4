"""What other threads post is taken on the event loop, in order, and nothing is left open."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from pathlib import Path

import pytest

from src.engine.arrivals import Arrivals

pytestmark = pytest.mark.anyio

DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture(params=["as the system can", "without eventfd", "without readers"])
def loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "without eventfd":
        monkeypatch.delattr(os, "eventfd", raising=False)
    if request.param == "without readers":
        monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", _no_readers)
    return str(request.param)


def _no_readers(*_: object) -> None:
    raise NotImplementedError


async def until(taken: list[int], count: int) -> None:
    async with asyncio.timeout(20):
        while len(taken) < count:
            await asyncio.sleep(0.001)


async def test_all_is_taken_on_the_loop_in_its_order(loop_kind: str) -> None:
    taken: list[int] = []
    threads: set[int] = set()

    def take(number: int) -> None:
        taken.append(number)
        threads.add(threading.get_ident())

    arrivals = Arrivals(take)
    arrivals.listen(asyncio.get_running_loop())
    arrivals.listen(asyncio.get_running_loop())

    def post(first: int) -> None:
        for number in range(first, first + 500):
            arrivals.post(number)

    for first in (0, 500):
        poster = threading.Thread(target=post, args=(first,))
        poster.start()
        await until(taken, first + 500)
        poster.join()
    assert taken == list(range(1000))
    assert threads == {threading.get_ident()}
    arrivals.close()


async def test_what_is_posted_before_the_end_is_taken(loop_kind: str) -> None:
    taken: list[int] = []
    arrivals = Arrivals(taken.append)
    arrivals.listen(asyncio.get_running_loop())
    arrivals.post(1)
    arrivals.post(2)
    arrivals.close()
    await until(taken, 2)
    assert taken == [1, 2]


def test_a_loop_that_is_gone_takes_nothing(loop_kind: str) -> None:
    taken: list[int] = []
    arrivals = Arrivals(taken.append)

    async def listen() -> None:
        arrivals.listen(asyncio.get_running_loop())

    asyncio.run(listen())
    arrivals.post(1)
    arrivals.close()
    assert not taken


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for descriptors")
def test_no_descriptor_stays_open() -> None:
    async def listen(ends: bool, closes: bool) -> None:
        taken: list[int] = []
        arrivals = Arrivals(taken.append)
        arrivals.listen(asyncio.get_running_loop())
        arrivals.post(1)
        if closes:
            arrivals.close()
        if ends:
            await asyncio.sleep(0)

    # The first loop leaves things behind that all later ones share.
    asyncio.run(asyncio.sleep(0))
    before = len(list(DESCRIPTORS.iterdir()))
    for ends, closes in [(True, True), (False, True), (True, False)]:
        asyncio.run(listen(ends, closes))
    gc.collect()
    assert len(list(DESCRIPTORS.iterdir())) == before
