"""The loop alone, on a device that answers when the test says so."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from src.core.config import ObservabilitySection
from src.core.errors import EngineDeadError, InvalidRequestError, SlipstreamError
from src.core.outputs import FinishReason
from src.core.plan import RowFailure, RowResult, StepPlan, StepResult, StepTimes
from src.core.settings import CHECKOUT
from src.core.step_message import StepMessage
from src.engine.execution.in_flight import InFlight
from src.engine.execution.worker import DeviceLostError
from src.engine.kv import prefix_cache as prefix
from src.engine.loop import EngineLoop
from src.engine.requests.submission import Submission
from src.engine.scheduling.scheduler import Scheduler
from src.engine.telemetry.observer import EngineObserver
from src.observability.metrics import EngineMetrics
from src.observability.tracing import Telemetry
from src.text import Tokenizer
from tests.engine.pure.simulation import make_limits, make_request

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

TOKENIZER = Tokenizer.from_directory(CHECKOUT / "configs" / "demo")
TOKEN = 40


class HeldRunner:
    """Takes steps and leaves them to the test."""

    def __init__(self) -> None:
        self.launched: list[InFlight] = []
        self.forgotten: list[int] = []

    def forget(self, ended: Sequence[int]) -> None:
        self.forgotten += ended

    def launch(self, message: StepMessage, then: Callable[[], object]) -> InFlight:
        in_flight = InFlight(message.plan, StepTimes(launched=time.monotonic()), then)
        self.launched.append(in_flight)
        return in_flight


def result_of(plan: StepPlan) -> StepResult:
    rows = [RowResult(row.row, row.generation, [TOKEN] * row.samples) for row in plan.rows]
    return StepResult(plan.step_id, rows)


class Harness:
    """A loop that runs at depth 2."""

    def __init__(self, **limits: Any) -> None:
        section = ObservabilitySection()
        self.metrics = EngineMetrics("m", legacy_names=False)
        self.observer = EngineObserver(self.metrics, section, Telemetry(section, "m", "0"))
        self.worker = HeldRunner()
        self.scheduler = Scheduler(make_limits(**limits))
        self.loop = EngineLoop(
            self.scheduler,
            self.worker,  # type: ignore[arg-type]
            self.observer,
            pipeline_depth=2,
        )
        self.running = asyncio.create_task(self.loop.run())

    def submit(self, key: int, max_tokens: int, **options: Any) -> Submission:
        request = make_request(key, [5, 6], max_tokens, ends=False, **options)
        submission = Submission(self.loop, TOKENIZER, f"r{key}", [request])
        submission.start()
        return submission

    async def until_launched(self, count: int) -> None:
        while len(self.worker.launched) < count:
            await asyncio.sleep(0)

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


async def read(submission: Submission) -> tuple[int, FinishReason | SlipstreamError | None]:
    """How many tokens came, and how it ended."""
    count, end = 0, None
    try:
        async for delta in submission:
            count += len(delta.token_ids)
            end = delta.finish_reason
    except SlipstreamError as error:
        return count, error
    return count, end


def fails(harness: Harness, monkeypatch: pytest.MonkeyPatch, name: str, *, at: int) -> None:
    original, calls = getattr(harness.scheduler, name), 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError(f"injected into {name}")
        return original(*arguments)

    monkeypatch.setattr(harness.scheduler, name, failing)


@pytest.mark.parametrize(
    ("error", "method"),
    [
        (RuntimeError("one step"), None),
        (DeviceLostError("every step"), None),
        (None, ("commit", 2)),
        (None, ("expire", 1)),
        (None, ("schedule", 1)),
    ],
    ids=["a step", "the device", "commit", "expire", "schedule"],
)
async def test_what_was_committed_in_the_turn_of_a_fault_reaches_its_readers(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, method: tuple[str, int] | None
) -> None:
    """One step has given both a token, the first its last one, when the next goes wrong."""
    harness = Harness()
    complete, cut = harness.submit(1, max_tokens=1), harness.submit(2, max_tokens=9)
    await harness.until_launched(2)
    if method is not None:
        fails(harness, monkeypatch, method[0], at=method[1])
    first, second = harness.worker.launched[:2]
    # Both are there when the loop turns.
    first.arrive(result_of(first.plan))
    second.arrive(error or result_of(second.plan))
    assert await read(complete) == (1, FinishReason.LENGTH)
    count, end = await read(cut)
    assert count >= 1
    assert isinstance(end, EngineDeadError)
    assert not harness.loop._choices
    await harness.end()


async def test_a_fault_in_the_last_publication_keeps_nobody_from_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    bad, good = harness.submit(1, max_tokens=9), harness.submit(2, max_tokens=9)
    await harness.until_launched(2)

    def broken(*arguments: Any) -> None:
        raise RuntimeError("injected into the text")

    def untold(*arguments: Any) -> None:
        raise RuntimeError("injected into finish")

    monkeypatch.setattr(bad.choices[0], "take", broken)
    monkeypatch.setattr(harness.scheduler, "finish", untold)
    fails(harness, monkeypatch, "schedule", at=1)
    first = harness.worker.launched[0]
    first.arrive(result_of(first.plan))
    assert [isinstance((await read(each))[1], EngineDeadError) for each in (bad, good)] == [
        True
    ] * 2
    await harness.end()


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
    async with asyncio.timeout(10):
        assert await read(submission) == (0, FinishReason.DEADLINE)
    assert time.monotonic() >= deadline
    await harness.end()


async def answered(harness: Harness, first: int, end: int, seconds: float) -> None:
    """The device answers these steps, each of which is said to have taken so long."""
    for number in range(first, end):
        await harness.until_launched(number + 1)
        step = harness.worker.launched[number]
        step.times.device_end = time.monotonic()
        step.times.device_start = step.times.device_end - seconds
        step.arrive(result_of(step.plan))
        await asyncio.sleep(0)


async def test_who_comes_while_a_step_runs_joins_the_next_one_if_that_is_planned_late() -> None:
    for plan_late in (False, True):
        harness = Harness(plan_late=plan_late)
        first = harness.submit(1, max_tokens=12)
        await answered(harness, 0, 6, seconds=2.0)
        await asyncio.sleep(0.02)
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
            await asyncio.sleep(0.02)
            assert len(harness.worker.launched) == 8
            assert len(harness.worker.launched[7].plan.rows) == 1
        await harness.end()
        for submission in (first, second):
            await read(submission)


async def test_a_step_that_ends_before_its_forecast_does_not_keep_the_next_one_waiting() -> None:
    harness = Harness(plan_late=True)
    submission = harness.submit(1, max_tokens=12)
    await answered(harness, 0, 6, seconds=100.0)
    async with asyncio.timeout(10):
        await answered(harness, 6, 12, seconds=100.0)
        assert await read(submission) == (12, FinishReason.LENGTH)
    await harness.end()


async def test_nobody_is_waited_for_who_would_find_no_row() -> None:
    harness = Harness(plan_late=True, max_num_seqs=1)
    submission = harness.submit(1, max_tokens=12)
    await answered(harness, 0, 6, seconds=100.0)
    async with asyncio.timeout(10):
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
    async with asyncio.timeout(10):
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

    monkeypatch.setattr(prefix.hashlib, "sha256", counting)
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


async def test_failures_that_are_not_in_a_row_do_not_end_the_engine() -> None:
    harness = Harness()
    for number in range(5):
        failed = harness.submit(2 * number, max_tokens=9)
        first = len(harness.worker.launched)
        await harness.until_launched(first + 2)
        # The second one is behind the first, and of the same request.
        harness.worker.launched[first].arrive(RuntimeError("injected"))
        assert isinstance((await read(failed))[1], EngineDeadError)
        harness.worker.launched[first + 1].arrive(
            result_of(harness.worker.launched[first + 1].plan)
        )
        served = harness.submit(2 * number + 1, max_tokens=1)
        await answered(harness, first + 2, first + 3, seconds=0.001)
        assert await read(served) == (1, FinishReason.LENGTH)
    await harness.end()


async def test_failures_in_a_row_end_the_engine() -> None:
    harness = Harness()
    for number in range(3):
        assert not harness.running.done()
        failed = harness.submit(number, max_tokens=1)
        await harness.until_launched(number + 1)
        harness.worker.launched[number].arrive(RuntimeError("injected"))
        assert isinstance((await read(failed))[1], EngineDeadError)
    with pytest.raises(RuntimeError, match="injected"):
        await harness.running
    with pytest.raises(EngineDeadError):
        harness.submit(9, max_tokens=1)


async def test_a_device_that_is_lost_ends_the_engine_at_once() -> None:
    harness = Harness()
    failed = harness.submit(1, max_tokens=9)
    await harness.until_launched(1)
    harness.worker.launched[0].arrive(DeviceLostError("injected"))
    assert isinstance((await read(failed))[1], EngineDeadError)
    with pytest.raises(DeviceLostError, match="injected"):
        await harness.running
    with pytest.raises(EngineDeadError):
        harness.submit(9, max_tokens=1)


async def test_what_was_committed_before_a_deadline_comes_before_it() -> None:
    harness = Harness()
    late = harness.submit(1, max_tokens=9, deadline=time.monotonic() + 0.05)
    await harness.until_launched(1)
    # It is over when the loop turns next, and has a token by then.
    time.sleep(0.06)  # noqa: ASYNC251
    first = harness.worker.launched[0]
    first.arrive(result_of(first.plan))
    assert await read(late) == (1, FinishReason.DEADLINE)
    await harness.end()


@pytest.mark.parametrize("fails_twice", [False, True])
async def test_a_row_that_fails_fails_once_and_keeps_what_it_had(fails_twice: bool) -> None:
    harness = Harness()
    failed, beside = harness.submit(1, max_tokens=9), harness.submit(2, max_tokens=3)
    await answered(harness, 0, 1, seconds=0.001)
    await harness.until_launched(3)
    # Both steps have their results when the loop turns.
    for number, step in enumerate(harness.worker.launched[1:3]):
        failures = [RowFailure(1, "no way on", is_own=True)] if number or fails_twice else []
        step.arrive(msgspec.structs.replace(result_of(step.plan), failures=failures))
    async with asyncio.timeout(10):
        count, end = await read(failed)
        assert (count, type(end)) == (1 if fails_twice else 2, InvalidRequestError)
        assert await read(beside) == (3, FinishReason.LENGTH)
        await harness.loop.wait_idle()
    reasons = {"reason": "grammar"}
    assert harness.metrics.value("slipstream_row_failures_total", **reasons) == 1
    await harness.end()


async def test_nothing_is_launched_behind_a_launch_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    plans: list[StepPlan] = []

    def launching(message: StepMessage, then: Callable[[], object]) -> InFlight:
        plans.append(message.plan)
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(harness.worker, "launch", launching)
        failed = harness.submit(1, max_tokens=9)
        assert isinstance((await read(failed))[1], EngineDeadError)
        await harness.loop.wait_idle()
    # A second one would name a row that the device was never told of.
    assert len(plans) == 1
    served = harness.submit(2, max_tokens=1)
    await answered(harness, 0, 1, seconds=0.001)
    assert await read(served) == (1, FinishReason.LENGTH)
    await harness.end()


async def test_the_worker_learns_of_all_that_ended_though_a_launch_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    launch = harness.worker.launch
    told: list[int] = []
    lost: list[int] = []

    def launching(message: StepMessage, then: Callable[[], object]) -> InFlight:
        if 2 in (request.key for request in message.admitted):
            lost.extend(message.ended)
            raise RuntimeError("injected")
        told.extend(message.ended)
        return launch(message, then)

    monkeypatch.setattr(harness.worker, "launch", launching)
    ended, beside = harness.submit(1, max_tokens=1), harness.submit(3, max_tokens=9)
    await answered(harness, 0, 1, seconds=0.001)
    await harness.until_launched(3)
    assert await read(ended) == (1, FinishReason.LENGTH)
    failed = harness.submit(2, max_tokens=1)
    await answered(harness, 1, 3, seconds=0.001)
    async with asyncio.timeout(10):
        for each in (beside, failed):
            assert isinstance((await read(each))[1], EngineDeadError)
        await harness.loop.wait_idle()
    assert lost == [1]
    assert sorted(told + harness.worker.forgotten) == [1, 2, 3]
    await harness.end()


@pytest.mark.parametrize("end", ["length", "stop string", "abort", "failure", "deadline"])
async def test_an_ended_request_leaves_no_timer(end: str) -> None:
    harness = Harness()
    soon = time.monotonic() + (0.02 if end == "deadline" else 600)
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
    async with asyncio.timeout(10):
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
    async with asyncio.timeout(10):
        assert (await read(submission))[1] is FinishReason.STOP
    assert harness.scheduler.state(1) is None
    # One step was launched before anybody knew.
    late = harness.worker.launched[2:]
    assert len(late) == 1
    late[0].arrive(result_of(late[0].plan))
    async with asyncio.timeout(10):
        await harness.loop.wait_idle()
    assert len(harness.worker.launched) == 3
    assert harness.scheduler.stats.discarded_tokens == 1
    await harness.end()
