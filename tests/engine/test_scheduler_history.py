"""A step costs the same after any number of requests: lines of Python that run, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from src.core.plan import RowResult, StepResult
from src.core.request import Request
from src.core.sampling_params import SamplingParams
from src.engine.scheduler import Scheduler, SchedulerLimits

ROWS = 8


def scheduler() -> Scheduler:
    return Scheduler(
        SchedulerLimits(
            max_num_seqs=ROWS,
            max_num_batched_tokens=2048,
            block_size=16,
            num_blocks=64,
            max_model_len=512,
        )
    )


def step(engine: Scheduler) -> None:
    plan = engine.schedule()
    assert plan is not None
    rows = [RowResult(r.row, r.generation, [7] if r.samples else []) for r in plan.rows]
    engine.commit(StepResult(plan.step_id, rows))


def run_through(engine: Scheduler, keys: range) -> None:
    """Requests of a block and a half, from arrival to end, one at a time."""
    for key in keys:
        prompt = list(range(100 * key, 100 * key + 24))
        engine.add(Request(key=key, prompt_token_ids=prompt, params=SamplingParams(), max_tokens=2))
        while engine.has_work:
            step(engine)


def lines_of(run: Callable[[], None]) -> int:
    """How many lines of Python ran."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def lines_after(history: int) -> tuple[int, int]:
    """Of one request from arrival to end, and of one step of full rows."""
    engine = scheduler()
    run_through(engine, range(history))
    lone = lines_of(lambda: run_through(engine, range(10**6, 10**6 + 1)))
    for key in range(ROWS):
        prompt = [key] * 8
        engine.add(
            Request(key=10**7 + key, prompt_token_ids=prompt, params=SamplingParams(), max_tokens=9)
        )
    while engine.num_waiting:
        step(engine)
    return lone, lines_of(lambda: step(engine))


@pytest.mark.parametrize("history", [200, 2000])
def test_a_step_runs_as_many_lines_after_any_history(history: int) -> None:
    # By then the pool is full, and every further block is another's.
    assert lines_after(history) == lines_after(100)


def test_a_loop_over_what_was_would_be_seen() -> None:
    def run(length: int) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(length):
                pass

        return loop

    assert lines_of(run(100)) > lines_of(run(10)) + 90
