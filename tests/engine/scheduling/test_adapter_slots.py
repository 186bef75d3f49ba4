"""Slots of adapters: who has one, who waits for one, and who has to go."""

from __future__ import annotations

import random

import msgspec

from src.core.adapter import Adapter
from src.core.outputs import FinishReason
from src.core.plan import RowResult, StepPlan, StepResult
from src.engine.scheduling.adapter_slots import AdapterSlots
from src.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.simulation import make_limits, make_request


def adapter(number: int) -> Adapter:
    return Adapter(number, f"adapter {number}", bytes([number]))


def add(scheduler: Scheduler, key: int, number: int | None, max_tokens: int = 4) -> None:
    request = make_request(key, 2, max_tokens, ends=False)
    chosen = None if number is None else adapter(number)
    scheduler.add(msgspec.structs.replace(request, adapter=chosen))


def step(scheduler: Scheduler) -> StepPlan | None:
    """Plan a step and commit it at once."""
    plan = scheduler.schedule()
    scheduler.check()
    if plan is not None:
        rows = [RowResult(r.row, r.generation, [7] * r.samples) for r in plan.rows]
        scheduler.commit(StepResult(plan.step_id, rows))
        scheduler.check()
    return plan


def installed(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return [(i.request_key, i.adapter, i.adapter_slot) for i in plan.installs]


def test_the_longest_unused_adapter_gives_way() -> None:
    slots = AdapterSlots(2, patience=5)
    for number in (1, 2, 1):
        assert slots.admits(adapter(number))
        slots.take(adapter(number))
    assert not slots.admits(adapter(3))
    slots.release(adapter(2))
    assert slots.admits(adapter(3))
    slots.release(adapter(1))
    # Another row of it is there still.
    assert slots.take(adapter(3)) == 1
    assert not slots.admits(adapter(2))
    slots.check([1, 3])


def test_who_waits_for_a_slot_holds_up_nobody() -> None:
    limits = make_limits(num_adapter_slots=1, max_num_seqs=4, num_blocks=40)
    scheduler = Scheduler(limits)
    add(scheduler, 0, 1, max_tokens=20)
    for key in range(1, 60):
        add(scheduler, key, 2)
    add(scheduler, 60, None)
    add(scheduler, 61, 1)
    found = installed(step(scheduler)) + installed(step(scheduler))
    assert found == [(0, 1, 0), (60, 0, -1), (61, 1, 0)]
    assert scheduler.num_waiting == 59
    scheduler.finish(30, FinishReason.ABORT)
    assert scheduler.num_waiting == 58
    while scheduler.has_work:
        assert step(scheduler) is not None
    scheduler.check_idle()


def test_busy_adapters_do_not_keep_the_slots_forever() -> None:
    limits = make_limits(num_adapter_slots=1, max_num_seqs=2, num_blocks=40, max_bypasses=3)
    scheduler = Scheduler(limits)
    add(scheduler, 0, 1)
    add(scheduler, 1000, 2)
    for key in range(1, 100):
        # There is always one more request of the busy adapter.
        add(scheduler, key, 1)
        step(scheduler)
        if scheduler.state(1000) is None:
            break
    assert key < 40
    while scheduler.has_work:
        assert step(scheduler) is not None
    scheduler.check_idle()


def test_who_goes_away_does_not_take_the_turn_of_the_others() -> None:
    """Of the requests that wait for one adapter some end; those that are left have waited too."""
    limits = make_limits(num_adapter_slots=1, max_num_seqs=3, num_blocks=60, max_bypasses=3)
    scheduler = Scheduler(limits)
    # Their rows never come free at once, so the slot is always in use.
    for key in (0, 1):
        add(scheduler, key, 1, max_tokens=3 + key)
    for key in (1000, 1001, 1002):
        add(scheduler, key, 2)
    step(scheduler)
    for key in range(2, 100):
        add(scheduler, key, 1, max_tokens=4)
        step(scheduler)
        if key == 2:
            for gone in (1000, 1002):
                scheduler.finish(gone, FinishReason.ABORT)
        if scheduler.state(1001) is None:
            break
    assert key < 40
    while scheduler.has_work:
        assert step(scheduler) is not None
    scheduler.check_idle()


def test_of_those_who_wait_for_an_adapter_the_first_comes_first() -> None:
    limits = make_limits(num_adapter_slots=1, max_num_seqs=2, num_blocks=40)
    scheduler = Scheduler(limits)
    add(scheduler, 0, 1, max_tokens=1)
    for key in (1, 2, 3):
        add(scheduler, key, 2)
    order = []
    while scheduler.has_work:
        order += [entry[0] for entry in installed(step(scheduler))]
    assert order == [0, 1, 2, 3]


def test_who_has_gone_away_closes_no_adapter() -> None:
    """Only while a request waits for it: nobody else would take its slot."""
    limits = make_limits(num_adapter_slots=1, max_num_seqs=2, num_blocks=40, max_bypasses=2)
    scheduler = Scheduler(limits)
    add(scheduler, 0, 1, max_tokens=30)
    add(scheduler, 1000, 2)
    step(scheduler)
    scheduler.finish(1000, FinishReason.ABORT)
    for key in range(1, 20):
        add(scheduler, key, 1, max_tokens=1)
        # Its row comes free with every step, and no request of the adapter waits.
        assert [entry[0] for entry in installed(step(scheduler))] == [key]


def test_the_slot_of_who_has_gone_away_is_another_one_s() -> None:
    """Of two that could get one slot the first was brought back, and ends before it has a row."""
    limits = make_limits(num_adapter_slots=1, max_num_seqs=2, num_blocks=40, policy="priority")
    scheduler = Scheduler(limits)
    add(scheduler, 0, 1, max_tokens=3)
    add(scheduler, 1, 2)
    add(scheduler, 2, 3)
    step(scheduler)
    # It takes the other row, and the next one that comes free.
    for key in (3, 4):
        scheduler.add(make_request(key, 2, 12 - 4 * (key == 4), ends=False, priority=-1))
        step(scheduler)
    while scheduler.state(0) is not None:
        step(scheduler)
    step(scheduler)
    scheduler.finish(1, FinishReason.ABORT)
    while scheduler.has_work:
        assert step(scheduler) is not None, "nothing is planned, though something waits"
    scheduler.check_idle()


def test_adapters_leave_in_the_order_of_their_last_use() -> None:
    slots = AdapterSlots(3, patience=5)
    for number in (1, 2, 3):
        slots.take(adapter(number))
    for number in (2, 3, 1):
        slots.release(adapter(number))
    # The second is used again, and so leaves last.
    slots.take(adapter(2))
    slots.release(adapter(2))
    for newcomer, leaves in ((4, 3), (5, 1), (6, 2)):
        assert slots.is_resident(leaves)
        slots.take(adapter(newcomer))
        assert not slots.is_resident(leaves)
    slots.check([4, 5, 6])


def test_random_loads_end_and_lose_nothing() -> None:
    chance = random.Random(3)
    for seed in range(20):
        limits = make_limits(
            num_adapter_slots=chance.randint(1, 3), num_blocks=12, max_bypasses=seed
        )
        scheduler = Scheduler(limits)
        for key in range(60):
            add(scheduler, key, chance.choice([None, 1, 2, 3, 4, 5]), chance.randint(1, 9))
            if chance.random() < 0.5:
                step(scheduler)
            if chance.random() < 0.2:
                scheduler.finish(chance.randint(0, key), FinishReason.ABORT)
        for _ in range(2000):
            if not scheduler.has_work:
                break
            assert step(scheduler) is not None, "nothing is planned, though something waits"
        scheduler.check_idle()
