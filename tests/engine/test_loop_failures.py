"""The loop alone: what goes wrong, with whom it ends, and what everybody else gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from src.core.errors import EngineDeadError, InvalidRequestError
from src.core.outputs import FinishReason
from src.core.plan import RowFailure, StepPlan
from src.core.step_message import StepMessage
from src.engine.execution.in_flight import InFlight
from src.engine.execution.worker import DeviceLostError
from tests.engine.loop_harness import (
    Harness,
    answered,
    read,
    result_of,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


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


async def test_a_text_that_fails_with_more_to_come_is_nobody_else_s_affair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    bad, good = harness.submit(1, max_tokens=9), harness.submit(2, max_tokens=3)
    await harness.until_launched(2)

    def broken(*arguments: Any) -> None:
        raise RuntimeError("injected into the text")

    monkeypatch.setattr(bad.choices[0], "take", broken)
    # Each has two tokens when the loop turns.
    for step in harness.worker.launched[:2]:
        step.arrive(result_of(step.plan))
    assert isinstance((await read(bad))[1], EngineDeadError)
    await answered(harness, 2, 3, seconds=0.001)
    async with asyncio.timeout(60):
        assert await read(good) == (3, FinishReason.LENGTH)
    assert not harness.running.done()
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
    async with asyncio.timeout(60):
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
    async with asyncio.timeout(60):
        for each in (beside, failed):
            assert isinstance((await read(each))[1], EngineDeadError)
        await harness.loop.wait_idle()
    assert lost == [1]
    assert sorted(told + harness.worker.forgotten) == [1, 2, 3]
    await harness.end()
