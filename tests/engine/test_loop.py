"""The loop alone: what it launches and when, whom it wakes, and what it leaves behind."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import msgspec
import pytest

from src.core.errors import EngineDeadError, SlipstreamError
from src.core.outputs import FinishReason
from src.engine.kv import hash_chain
from src.engine.requests.submission import Submission
from tests.engine.loop_harness import (
    TOKEN,
    TOKENIZER,
    Harness,
    answered,
    read,
    result_of,
    turns,
)
from tests.engine.scheduling.simulation import make_request

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


async def test_a_deadline_is_seen_though_its_timer_was_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else wakes the loop: the device does not answer."""
    harness = Harness()
    event_loop = asyncio.get_running_loop()
    call_later = event_loop.call_later

    def early(delay: float, *arguments: Any) -> asyncio.TimerHandle:
        return call_later(delay / 2, *arguments)

    monkeypatch.setattr(event_loop, "call_later", early)
    deadline = time.monotonic() + 0.1
    submission = harness.submit(1, max_tokens=9, deadline=deadline)
    async with asyncio.timeout(60):
        assert await read(submission) == (0, FinishReason.DEADLINE)
    assert time.monotonic() >= deadline
    await harness.end()


async def test_who_comes_while_a_step_runs_joins_the_next_one_if_that_is_planned_late() -> None:
    for plan_late in (False, True):
        harness = Harness(plan_late=plan_late)
        first = harness.submit(1, max_tokens=12)
        await answered(harness, 0, 6, seconds=2.0)
        await turns()
        running = len(harness.worker.launched)
        # Late, nothing is queued behind the step that runs.
        assert running == (7 if plan_late else 8)
        second = harness.submit(2, max_tokens=2)
        begun = time.monotonic()
        if plan_late:
            await harness.until_launched(8)
            assert time.monotonic() - begun > 0.2
            assert len(harness.worker.launched[7].plan.rows) == 2
        else:
            await turns()
            assert len(harness.worker.launched) == 8
            assert len(harness.worker.launched[7].plan.rows) == 1
        await harness.end()
        for submission in (first, second):
            await read(submission)


async def test_a_step_that_ends_before_its_forecast_does_not_keep_the_next_one_waiting() -> None:
    harness = Harness(plan_late=True)
    submission = harness.submit(1, max_tokens=12)
    await answered(harness, 0, 6, seconds=100.0)
    async with asyncio.timeout(60):
        await answered(harness, 6, 12, seconds=100.0)
        assert await read(submission) == (12, FinishReason.LENGTH)
    await harness.end()


async def test_nobody_is_waited_for_who_would_find_no_row() -> None:
    harness = Harness(plan_late=True, max_num_seqs=1)
    submission = harness.submit(1, max_tokens=12)
    await answered(harness, 0, 6, seconds=100.0)
    async with asyncio.timeout(60):
        await harness.until_launched(8)
    await harness.end()
    await read(submission)


async def test_while_a_plan_is_timed_all_else_goes_on() -> None:
    """The step that runs is said to take minutes."""
    harness = Harness(plan_late=True)
    aborted = harness.submit(1, max_tokens=12)
    await answered(harness, 0, 6, seconds=1000.0)
    late = harness.submit(2, max_tokens=9, deadline=time.monotonic() + 0.05)
    failed = harness.submit(3, max_tokens=9)
    async with asyncio.timeout(60):
        assert (await read(late))[1] is FinishReason.DEADLINE
        harness.loop.abort(1)
        assert (await read(aborted))[1] is FinishReason.ABORT
        assert len(harness.worker.launched) == 7
        # Once the step that runs has ended, the next one is launched; and that one fails.
        await answered(harness, 6, 7, seconds=1000.0)
        await harness.until_launched(8)
        harness.worker.launched[7].arrive(RuntimeError("injected"))
        assert isinstance((await read(failed))[1], EngineDeadError)
        # Of steps with prompts it has seen too few to wait, so one is behind it.
        await answered(harness, 8, 9, seconds=1000.0)
        await harness.loop.wait_idle()
        assert harness.loop._plan_timer is None
        ended = harness.submit(4, max_tokens=9)
        await answered(harness, 9, 12, seconds=1000.0)
        await harness.end()
        assert isinstance((await read(ended))[1], SlipstreamError)
    assert harness.loop._plan_timer is None


async def test_the_prompt_of_many_completions_is_hashed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    prompt = list(range(5, 25))  # ten blocks
    requests = [
        msgspec.structs.replace(make_request(key, 1, 4), prompt_token_ids=prompt)
        for key in range(4)
    ]
    hashed: list[bytes] = []
    sha256 = hashlib.sha256

    def counting(content: bytes) -> Any:
        hashed.append(content)
        return sha256(content)

    monkeypatch.setattr(hash_chain.hashlib, "sha256", counting)
    Submission(harness.loop, TOKENIZER, "r", requests).start()
    for state in map(harness.scheduler.state, range(4)):
        assert state is not None
        state.chain.digest(9, state.token_ids)
    blocks = [content for content in hashed if len(content) > 40]
    assert len(blocks) == 10
    await harness.end()


async def test_the_plans_that_are_kept_have_no_prompts() -> None:
    harness = Harness()
    harness.submit(1, max_tokens=3)
    await harness.until_launched(1)
    (shown, *_) = msgspec.to_builtins(list(harness.observer.plans))
    assert harness.worker.launched[0].plan.installs[0].token_ids == [5, 6]
    assert shown["installs"][0].keys() == {
        "row", "generation", "key", "num_tokens", "prompt_len", "block_ids"
    }  # fmt: skip
    assert shown["installs"][0]["num_tokens"] == 2
    assert shown["rows"][0]["num_tokens"] == 2
    await harness.end()


async def test_what_was_committed_before_a_deadline_comes_before_it() -> None:
    harness = Harness()
    late = harness.submit(1, max_tokens=9, deadline=time.monotonic() + 1.5)
    await harness.until_launched(1)
    # It is over when the loop turns next, and has a token by then.
    time.sleep(1.5)  # noqa: ASYNC251
    first = harness.worker.launched[0]
    first.arrive(result_of(first.plan))
    assert await read(late) == (1, FinishReason.DEADLINE)
    await harness.end()


@pytest.mark.parametrize("end", ["length", "stop string", "abort", "failure", "deadline"])
async def test_an_ended_request_leaves_no_timer(end: str) -> None:
    harness = Harness()
    soon = time.monotonic() + (1.5 if end == "deadline" else 600)
    stop = [TOKENIZER.decode([TOKEN])] if end == "stop string" else None
    submission = harness.submit(1, max_tokens=1 if end == "length" else 9, deadline=soon, stop=stop)
    (timer,) = harness.loop._timers.values()
    await harness.until_launched(1)
    first = harness.worker.launched[0]
    if end == "failure":
        first.arrive(RuntimeError("injected"))
    elif end == "abort":
        harness.loop.abort(1)
    elif end != "deadline":
        first.arrive(result_of(first.plan))
    async with asyncio.timeout(60):
        await read(submission)
    assert harness.loop._timers == {}
    assert end == "deadline" or timer.cancelled()
    await harness.end()


async def test_a_stop_string_ends_the_request_in_the_scheduler_too() -> None:
    harness = Harness()
    submission = harness.submit(1, max_tokens=20, stop=[TOKENIZER.decode([TOKEN, TOKEN])])
    await answered(harness, 0, 1, seconds=0.001)
    await harness.until_launched(3)
    await answered(harness, 1, 2, seconds=0.001)
    async with asyncio.timeout(60):
        assert (await read(submission))[1] is FinishReason.STOP
    assert harness.scheduler.state(1) is None
    # One step was launched before anybody knew.
    late = harness.worker.launched[2:]
    assert len(late) == 1
    late[0].arrive(result_of(late[0].plan))
    async with asyncio.timeout(60):
        await harness.loop.wait_idle()
    assert len(harness.worker.launched) == 3
    assert harness.scheduler.stats.discarded_tokens == 1
    await harness.end()
