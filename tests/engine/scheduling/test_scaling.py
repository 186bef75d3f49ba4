"""The cost of a step must not grow with the queue, nor with what has ended long ago.

Lines executed are counted, which no busy machine can disturb; the fastest of many runs is timed
too, for what hides in C.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from src.core.outputs import FinishReason
from src.core.plan import RowResult, StepPlan, StepResult
from src.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.simulation import make_limits, make_request

MANY = 100_000


def count_lines(action: Callable[[], object]) -> int:
    lines = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines


def fastest(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time_ns()
        action()
        times.append(time.process_time_ns() - start)
    return min(times)


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    rows = [RowResult(r.row, r.generation, [7] if r.samples else []) for r in plan.rows]
    scheduler.commit(StepResult(plan.step_id, rows))
    return plan


def busy(num_waiting: int) -> Scheduler:
    """Eight rows that decode and hold all blocks, and so many requests waiting for one."""
    limits = {
        "max_num_seqs": 9,
        "block_size": 1000,
        "num_blocks": 8,
        "max_model_len": 1000,
        "max_waiting_requests": 10**9,
        "max_waiting_tokens": 10**9,
    }
    scheduler = Scheduler(make_limits(**limits))
    for key in range(8):
        scheduler.add(make_request(key, 1, 900, ends=False))
    step(scheduler)
    for key in range(8, 8 + num_waiting):
        scheduler.add(make_request(key, [1, 1], 2, deadline=1e9))
    step(scheduler)
    assert scheduler.num_waiting == num_waiting
    return scheduler


def test_no_cost_grows_with_the_queue() -> None:
    few, many = busy(4000), busy(MANY)
    assert count_lines(lambda: step(many)) <= 1.2 * count_lines(lambda: step(few))
    assert fastest(lambda: step(many), 60) <= 4 * fastest(lambda: step(few), 60)

    def abort(scheduler: Scheduler, start: int, count: int = 100) -> Callable[[], None]:
        keys = iter(range(start, 4000))

        def some() -> None:
            for _ in range(count):
                assert scheduler.finish(next(keys), FinishReason.ABORT) is not None

        return some

    assert count_lines(abort(many, 1000)) <= 1.2 * count_lines(abort(few, 1000))
    assert fastest(abort(many, 2000), 9) <= 6 * fastest(abort(few, 2000), 9)
    for key in range(MANY + 8):
        many.finish(key, FinishReason.ABORT)
    assert many.num_waiting == many.waiting_tokens == 0
    many.check_idle()


def test_a_step_does_not_slow_down_with_history() -> None:
    def age(requests: int) -> int:
        scheduler = Scheduler(make_limits())
        for key in range(requests):
            scheduler.add(make_request(key, 3, 2, ends=False, deadline=1e9))
            while scheduler.has_work:
                step(scheduler)
        scheduler.add(make_request(requests, 3, 9, ends=False))
        step(scheduler)
        return count_lines(lambda: step(scheduler))

    assert age(2000) <= age(3) + 5


def test_going_idle_costs_the_same_whatever_the_pool() -> None:
    def idle(num_blocks: int) -> Scheduler:
        scheduler = Scheduler(make_limits(num_blocks=num_blocks))
        scheduler.add(make_request(0, 9, 3, ends=False))
        while scheduler.has_work:
            step(scheduler)
        return scheduler

    small, large = idle(12), idle(500_000)
    assert count_lines(large.check_idle) == count_lines(small.check_idle)
    assert fastest(large.check_idle, 200) <= 10 * fastest(small.check_idle, 200)


def test_a_long_prefix_is_not_walked_again_while_it_waits() -> None:
    def waiting(cached: int) -> Scheduler:
        """Rows that decode, and evict, while long prompts with cached prefixes do not fit."""
        num_blocks = cached + 40
        limits = {
            "max_num_seqs": 32,
            "max_num_batched_tokens": 2 * num_blocks,
            "num_blocks": num_blocks,
            "max_model_len": 2 * num_blocks,
            "max_waiting_tokens": 10**9,
        }
        scheduler = Scheduler(make_limits(**limits))
        prefix = list(range(2 * cached))
        scheduler.add(make_request(0, [*prefix, 1], 1, ends=False))
        while scheduler.has_work:
            step(scheduler)
        for key in range(1, 9):
            scheduler.add(make_request(key, 1, 600, ends=False))
        step(scheduler)
        for key in range(9, 19):
            scheduler.add(make_request(key, [*prefix, *range(70)], 2))
        for _ in range(12):
            step(scheduler)
        return scheduler

    few, many = waiting(500), waiting(20_000)
    evictable = many._allocator.pool.num_cached

    def steps(scheduler: Scheduler) -> Callable[[], None]:
        def some() -> None:
            for _ in range(8):
                step(scheduler)

        return some

    assert count_lines(steps(many)) <= 1.2 * count_lines(steps(few))
    assert fastest(steps(many), 5) <= 4 * fastest(steps(few), 5)
    assert many._allocator.pool.num_cached < evictable - 50  # there were evictions meanwhile
    assert (many.num_waiting, many.num_running) == (few.num_waiting, few.num_running) == (10, 8)
    many.check()
