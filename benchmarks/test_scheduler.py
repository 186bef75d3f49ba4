"""The host's cost per step: planning and committing, without a device."""

from __future__ import annotations

import time
from typing import Any

import pytest

from src.core.plan import RowResult, StepPlan, StepResult
from src.core.request import Request
from src.core.sampling_params import SamplingParams
from src.engine.kv.block_pool import BlockPool
from src.engine.scheduling.scheduler import Scheduler, SchedulerLimits

# CPU time, so that other programs do not count.
pytestmark = pytest.mark.benchmark(timer=time.thread_time)


def scheduler_of(rows: int, **changes: Any) -> Scheduler:
    limits = {
        "max_num_seqs": rows,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
        "num_blocks": rows * 512,
        "max_model_len": 8192,
        **changes,
    }
    return Scheduler(SchedulerLimits(**limits))


def request(key: int, prompt_len: int, max_tokens: int) -> Request:
    tokens = list(range(key * prompt_len, (key + 1) * prompt_len))
    return Request(key=key, prompt_token_ids=tokens, params=SamplingParams(), max_tokens=max_tokens)


def result_of(plan: StepPlan) -> StepResult:
    rows = [RowResult(r.row, r.generation, [7] if r.samples else []) for r in plan.rows]
    return StepResult(plan.step_id, rows)


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(result_of(plan))


@pytest.mark.parametrize("rows", [1, 32, 256])
def test_decode_step(benchmark: Any, rows: int) -> None:
    """Every row decodes one token, as in nearly all steps."""
    scheduler = scheduler_of(rows)
    for key in range(rows):
        scheduler.add(request(key, prompt_len=16, max_tokens=8000))
    while scheduler.num_waiting:
        step(scheduler)
    benchmark.pedantic(step, (scheduler,), rounds=500, warmup_rounds=5)
    assert scheduler.num_running == rows


HISTORIES = [10, 1000, 100_000]


def run_through(scheduler: Scheduler, count: int, first_key: int) -> None:
    """Run ``count`` requests with prompts of 1.5 blocks and two output tokens to their end."""
    end = first_key + count
    for batch in range(first_key, end, 64):
        for key in range(batch, min(batch + 64, end)):
            scheduler.add(request(key, prompt_len=24, max_tokens=2))
        while scheduler.has_work:
            step(scheduler)


@pytest.mark.parametrize("history", HISTORIES)
def test_decode_step_after_a_history(benchmark: Any, history: int) -> None:
    """32 rows after a history of requests, which must not leave anything behind."""
    scheduler = scheduler_of(64, num_blocks=4096)
    run_through(scheduler, history, first_key=1000)
    for key in range(32):
        scheduler.add(request(key, prompt_len=16, max_tokens=1500))
    while scheduler.num_waiting:
        step(scheduler)
    benchmark.group = "scheduler, 32 rows after a history"
    benchmark.extra_info["requests before"] = history
    benchmark.pedantic(step, (scheduler,), rounds=500, warmup_rounds=5)
    assert scheduler.num_running == 32


@pytest.mark.parametrize("history", HISTORIES)
def test_request_after_a_history(benchmark: Any, history: int) -> None:
    """Arrival, prefill and end of one request that evicts the blocks of others."""
    scheduler = scheduler_of(64, num_blocks=256)
    run_through(scheduler, history, first_key=1000)
    keys = iter(range(10**6, 10**9))

    def turn() -> None:
        scheduler.add(request(next(keys), prompt_len=64, max_tokens=1))
        step(scheduler)

    benchmark.group = "scheduler, one request after a history"
    benchmark.extra_info["requests before"] = history
    # As many as fill the pool, so that every measured one evicts.
    benchmark.pedantic(turn, rounds=500, warmup_rounds=100)
    assert not scheduler.has_work


@pytest.mark.parametrize("history", HISTORIES)
def test_block_pool_after_a_history(benchmark: Any, history: int) -> None:
    """A table of 64 blocks is allocated, cached and freed; the oldest cached blocks are evicted."""
    pool = BlockPool(4096)

    def turn() -> None:
        table = pool.allocate(64)
        for block in table[:48]:
            pool.keep(block)
        pool.release(table)

    for _ in range(history):
        turn()
    benchmark.group = "block pool, 64 blocks after a history"
    benchmark.extra_info["requests before"] = history
    benchmark.pedantic(turn, rounds=500, warmup_rounds=5)
    assert pool.is_whole
    assert pool.num_held == 0


@pytest.mark.parametrize("waiting", [0, 2000])
def test_admission_behind_a_queue(benchmark: Any, waiting: int) -> None:
    """One arrival, one prefill step and one end, with requests waiting in the queue."""
    scheduler = scheduler_of(1, num_blocks=64)
    for key in range(1, waiting + 1):
        scheduler.add(request(key, prompt_len=64, max_tokens=1))
    keys = iter(range(waiting + 1, 10**9))

    def turn() -> None:
        scheduler.add(request(next(keys), prompt_len=64, max_tokens=1))
        step(scheduler)

    benchmark.pedantic(turn, rounds=300, warmup_rounds=5)


def test_prefix_hit(benchmark: Any) -> None:
    """A prompt of 4096 tokens, all cached except the last block."""
    scheduler = scheduler_of(4, num_blocks=1024)
    shared = list(range(4096))
    keys = iter(range(10**9))

    def turn() -> None:
        key = next(keys)
        prompt = [*shared, 5000 + key]
        scheduler.add(
            Request(key=key, prompt_token_ids=prompt, params=SamplingParams(), max_tokens=1)
        )
        while scheduler.has_work:
            step(scheduler)

    turn()
    benchmark.pedantic(turn, rounds=100, warmup_rounds=2)
    assert scheduler.stats.prefix_cache_hits > 100 * 4000
