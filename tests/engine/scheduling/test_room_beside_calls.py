"""Calls of many texts leave room in the waiting queue to requests that are alone."""

from __future__ import annotations

import msgspec
import pytest

from src.core.errors import InvalidRequestError, QueueFullError
from src.core.outputs import FinishReason
from src.core.request import Request
from src.engine.requests.embedding_run import _WINDOW
from src.engine.scheduling.scheduler import Scheduler
from src.engine.scheduling.waiting import Reservation
from tests.engine.scheduling.simulation import make_limits, make_request

BIG = {"num_blocks": 4096, "max_model_len": 512}


def text(key: int, call: int, num_tokens: int = 4, tenant: str = "") -> Request:
    """A text for a vector, of a call."""
    request = make_request(key, [1000 * (key + 1) + place for place in range(num_tokens)], 1)
    return msgspec.structs.replace(request, pooling="last", task="embed", call=call, tenant=tenant)


class Callers:
    """Calls of many texts, each of which queues what it may."""

    def __init__(self, scheduler: Scheduler, tenant: str = "") -> None:
        self.scheduler = scheduler
        self.tenant = tenant
        # Keys of the texts that a call has queued.
        self.calls: list[list[int]] = []
        self.next_key = 10_000 * (1 + sum(tenant.encode()))

    def begin(self) -> None:
        """A new call queues its first text."""
        self.calls.append([])
        self._add(self.calls[-1])

    def fill(self) -> int:
        """All calls queue further texts, in turns, as many as may be; returns all that wait."""
        while self._queue_further():
            pass
        return sum(map(len, self.calls))

    def _queue_further(self) -> bool:
        for call in self.calls:
            try:
                self._add(call)
            except QueueFullError:
                return False
        return True

    def _add(self, call: list[int]) -> None:
        key = self.next_key
        self.scheduler.add(text(key, call[0] if call else key, tenant=self.tenant))
        self.next_key += 1
        call.append(key)


def alone(scheduler: Scheduler, tenant: str = "") -> int:
    """Requests of one text that are let in until the queue is full."""
    for count in range(1000):
        try:
            scheduler.add(make_request(count, 4, 2, tenant=tenant))
        except QueueFullError:
            return count
    raise AssertionError("the queue is never full")


@pytest.mark.parametrize("num_calls", [1, 2, 10, 15])
def test_a_place_is_left_for_every_three_texts_behind_the_first_of_their_calls(
    num_calls: int,
) -> None:
    scheduler = Scheduler(make_limits(**BIG, max_waiting_requests=64))
    callers = Callers(scheduler)
    for _ in range(num_calls):
        callers.begin()
    waiting = callers.fill()
    further, left = waiting - num_calls, 64 - waiting
    assert further <= 3 * left
    # And one more would be too many.
    assert further + 1 > 3 * (left - 1)
    assert alone(scheduler) == left


def test_texts_leave_a_place_for_what_others_take() -> None:
    """The more others wait, the fewer texts do: others may add as much as those leave."""
    scheduler = Scheduler(make_limits(**BIG, max_waiting_requests=64))
    for key in range(40):
        scheduler.add(make_request(key, 4, 2))
    callers = Callers(scheduler)
    callers.begin()
    assert callers.fill() == 1 + 17
    # One place is free that a text takes, and a third of another one.
    scheduler.finish(0, FinishReason.ABORT)
    assert callers.fill() == 1 + 18
    scheduler.finish(1, FinishReason.ABORT)
    scheduler.finish(callers.calls[0].pop(), FinishReason.ABORT)
    assert callers.fill() == 1 + 18
    scheduler.check()


def test_a_call_may_begin_while_there_is_any_room() -> None:
    scheduler = Scheduler(make_limits(**BIG, max_waiting_requests=8))
    callers = Callers(scheduler)
    callers.begin()
    assert callers.fill() == 6
    callers.begin()
    callers.begin()
    assert callers.fill() == 8
    with pytest.raises(QueueFullError, match="8 requests are waiting, at most 8 may"):
        callers.begin()
    # As calls come, nothing further is queued until there is room for it again.
    scheduler.finish(callers.calls[1][0], FinishReason.ABORT)
    del callers.calls[1]
    with pytest.raises(QueueFullError, match="5 texts are waiting behind the first of their calls"):
        scheduler.add(text(1, callers.calls[0][0]))


@pytest.mark.parametrize("tenant", ["", "a"])
def test_an_empty_queue_takes_any_text(tenant: str) -> None:
    """While the first one of its call runs."""
    scheduler = Scheduler(make_limits(**BIG, max_waiting_requests=2))
    scheduler.add(text(0, 0, tenant=tenant))
    assert scheduler.schedule() is not None
    scheduler.add(text(1, 0, tenant=tenant))
    with pytest.raises(QueueFullError):
        scheduler.add(text(2, 0, tenant=tenant))


def test_texts_of_a_tenant_leave_room_to_its_other_requests_and_to_those_of_others() -> None:
    scheduler = Scheduler(make_limits(**BIG, max_waiting_requests=64))
    callers = Callers(scheduler, "a")
    callers.begin()
    # All of a tenant's requests are at most half of the queue.
    assert callers.fill() == 1 + 23
    assert alone(scheduler, "a") == 8
    others = Callers(scheduler, "b")
    others.begin()
    assert others.fill() == 1 + 11


def reserved(reservation: Reservation, num_tokens: int) -> int:
    """Texts of so many tokens that are counted until one is refused."""
    for count in range(10_000):
        try:
            reservation.add(num_tokens)
        except (InvalidRequestError, QueueFullError):
            return count
    raise AssertionError("there is always room")


def test_tokens_of_calls_leave_room_to_requests_that_are_alone() -> None:
    scheduler = Scheduler(make_limits(**BIG, max_waiting_tokens=4000))
    calls = [scheduler.reservation() for _ in range(4)]
    assert [reserved(call, 10) for call in calls] == [200, 100, 1, 1]
    with pytest.raises(QueueFullError, match="3020 tokens are waiting that are of texts behind"):
        calls[3].add(10)
    # Who is alone takes what is left, and then more only when there is room.
    scheduler.check_queue(1, 980)
    with pytest.raises(QueueFullError, match="3020 tokens are waiting, with 981 more"):
        scheduler.check_queue(1, 981)
    # What is queued counts as before.
    scheduler.add(text(0, 0, 10))
    calls[0].take_off(10)
    for key in range(1, 31):
        scheduler.add(text(key, 0, 10))
        calls[0].take_off(10)
    with pytest.raises(QueueFullError, match="3010 tokens are waiting that are of texts behind"):
        calls[3].add(10)
    calls[1].close()
    scheduler.check_queue(1, 1980)
    assert reserved(calls[3], 10) == 98


@pytest.mark.parametrize(("tenant", "most"), [("", 2000), ("a", 1490)])
def test_what_is_refused_for_good_is_what_no_empty_queue_would_take(tenant: str, most: int) -> None:
    scheduler = Scheduler(make_limits(**BIG, max_waiting_tokens=4000))
    reservation = scheduler.reservation(tenant)
    assert reserved(reservation, 10) == most // 10
    with pytest.raises(InvalidRequestError, match="tokens together, but at most so many may wait"):
        reservation.add(10)
    reservation.close()
    assert not scheduler._waiting._reserved
    # A text that is alone, or the first, has any length.
    reservation.add(3000)


def test_calls_share_what_all_of_them_may_have() -> None:
    scheduler = Scheduler(make_limits(**BIG, max_waiting_requests=64, max_num_seqs=16))
    calls = [scheduler.reservation() for _ in range(100)]
    other = scheduler.reservation("a")
    assert calls[0].share == 48
    for count, call in enumerate(calls, 1):
        call.add(5)
        call.add(5)
        call.add(5)
        # Whoever has queued nothing yet has no part in it.
        assert call.share == calls[0].share == max(1, 48 // max(1, count - 1))
        call.take_off(5)
        assert call.share == calls[0].share == max(1, 48 // count)
    assert other.share == 24
    other.add(5)
    other.add(5)
    other.take_off(5)
    assert other.share == 24
    # Those that have queued everything share it no longer.
    for call in calls[2:]:
        call.take_off(5)
        assert call.num_tokens == 5
    assert calls[0].share == 1
    for call in calls[2:]:
        call.take_off(5)
    assert calls[0].share == calls[2].share == 24
    # What the queue did not take is to be queued again.
    calls[2].restore(5)
    assert calls[0].share == 16
    for call in calls[1:]:
        call.close()
        call.close()
    assert calls[0].share == 48


@pytest.mark.parametrize("tenant", ["", "a"])
def test_what_calls_share_is_what_they_have_and_what_the_queue_would_take(tenant: str) -> None:
    scheduler = Scheduler(make_limits(**BIG, max_waiting_requests=64, max_num_seqs=4))
    call = scheduler.reservation(tenant)
    first = Callers(scheduler, tenant)
    first.begin()
    assert call.share == (23 if tenant else 47)
    assert first.fill() == 1 + call.share
    # Others have as much less as they take: with a key, they leave as much as that to everybody.
    others = Callers(scheduler, "b")
    for _ in range(8):
        others.begin()
    assert call.share == (20 if tenant else 41)


def test_steps_are_full_however_many_calls_share_the_queue() -> None:
    """By default a bulk of texts has all that may be queued of one call, and so have 24 of them."""
    scheduler = Scheduler(make_limits(**BIG, max_num_seqs=64, max_waiting_requests=2048))
    # Calls that still read their texts take nothing from the others.
    for _ in range(2100):
        scheduler.reservation().add(5)
    calls = [scheduler.reservation() for _ in range(2100)]
    for count, call in enumerate(calls, 1):
        call.add(5)
        call.add(5)
        call.take_off(5)
        assert (call.share >= _WINDOW) == (count <= 24)
        # Beside as many as a step has rows there are as many for the next one.
        assert min(call.share, _WINDOW) * count >= min(count * _WINDOW, 2 * 64)
