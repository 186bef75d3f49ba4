"""Threads whose jobs are of several owners."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait

import pytest

from src.core.turn_pool import TurnPool


@pytest.fixture
def pool() -> Iterator[TurnPool]:
    pool = TurnPool(1, "turns")
    yield pool
    pool.close()


def occupy(pool: TurnPool) -> threading.Event:
    """Keep the thread busy until this is set."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(30)

    pool.submit("loud", work)
    assert begun.wait(30)
    return go_on


def test_owners_take_turns_and_their_jobs_come_in_order(pool: TurnPool) -> None:
    go_on, order = occupy(pool), []
    jobs = [pool.submit("loud", lambda number=number: order.append(number)) for number in range(4)]
    jobs += [pool.submit("quiet", lambda: order.append("quiet")) for _ in range(2)]
    go_on.set()
    wait([job.future for job in jobs], 30)
    assert order == [0, "quiet", 1, "quiet", 2, 3]


def test_a_job_that_several_wait_for_is_done_once_in_the_first_turn(
    pool: TurnPool, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, order = occupy(pool), []
    for number in range(3):
        pool.submit("loud", lambda number=number: order.append(number))
    last = pool.submit("loud", lambda: order.append("wanted"))
    pool.share("quiet", last)
    go_on.set()
    last.future.result(30)
    pool.submit("loud", lambda: order.append("end")).future.result(30)
    assert order == [0, "wanted", 1, 2, "end"]
    # A future that is done already would say so there.
    assert not caplog.records


def test_what_is_cancelled_is_not_done(pool: TurnPool) -> None:
    go_on, did = occupy(pool), []
    given_up = pool.submit("a", lambda: did.append("given up"))
    assert given_up.future.cancel()
    go_on.set()
    pool.submit("a", lambda: did.append("wanted")).future.result(30)
    assert did == ["wanted"]


class Text(str):
    """A text that can be referred to weakly."""

    __slots__ = ("__weakref__",)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_refused_text_goes_with_its_error(pool: TurnPool) -> None:
    def submit(text: Text) -> weakref.ref[Text]:
        future = pool.submit("a", lambda: int(text)).future
        assert isinstance(future.exception(30), ValueError)
        return weakref.ref(text)

    text = submit(Text("no number"))
    # The thread leaves the job once it has begun with the next.
    pool.submit("a", lambda: 1).future.result(30)
    assert text() is None


@pytest.mark.usefixtures("no_collector")
def test_what_is_cancelled_keeps_no_text_until_its_turn(pool: TurnPool) -> None:
    def submit(text: Text) -> weakref.ref[Text]:
        assert pool.submit("a", lambda: int(text)).future.cancel()
        return weakref.ref(text)

    go_on = occupy(pool)
    text = submit(Text("5"))
    left = text()
    go_on.set()
    assert left is None


def test_an_error_is_its_own_jobs(pool: TurnPool) -> None:
    failed = pool.submit("a", lambda: 1 // 0)
    assert isinstance(failed.future.exception(30), ZeroDivisionError)
    assert pool.submit("a", lambda: 5).future.result(30) == 5


def test_closing_waits_for_what_has_begun_and_cancels_the_rest(pool: TurnPool) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go_on.wait(30)
        return "done"

    first = pool.submit("a", work)
    begun.wait(30)
    second = pool.submit("b", lambda: "never")
    closing = threading.Thread(target=pool.close)
    closing.start()
    with pytest.raises(CancelledError):
        second.future.result(30)
    assert closing.is_alive()
    go_on.set()
    closing.join(30)
    assert first.future.result(0) == "done"
    with pytest.raises(RuntimeError):
        pool.submit("a", lambda: None)
    pool.close()
