"""Forward progress: what counts as a stall, what is said to hang, and who notices a dead loop."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, SamplingParams
from src.core.plan import StepTimes
from src.core.status import Stall
from src.engine.execution.step_computer import StepComputer
from src.engine.telemetry import health
from src.engine.telemetry.health import FIRST_PATIENCE, FIRST_STEPS, Heartbeat, Progress, Watchdog
from tests.support.engines import assert_idle, small_config

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


def warmed_up(patience: float = 10.0) -> Progress:
    """Behind its first steps, without work, at time 100."""
    progress = Progress(patience)
    progress.submitted(0.0)
    for _ in range(FIRST_STEPS):
        progress.launched(StepTimes(launched=0.0))
        progress.committed(100.0)
    progress.ended()
    return progress


def test_nothing_to_do_is_no_stall() -> None:
    progress = warmed_up()
    assert progress.stall(1e9) is None
    assert progress.waited(1e9) == 0


def test_a_stall_begins_when_the_last_step_completed_or_work_arrived() -> None:
    progress = warmed_up()
    progress.submitted(500.0)
    assert progress.stall(510.0) is None
    assert progress.stall(511.0) == Stall("planning", 11.0)
    progress.launched(StepTimes(launched=512.0))
    # More work is no progress.
    progress.submitted(512.0)
    assert progress.stall(513.0) == Stall("launching", 13.0)
    progress.committed(513.0)
    assert progress.stall(520.0) is None
    assert progress.waited(520.0) == 7.0


@pytest.mark.parametrize(
    ("times", "phase"),
    [
        ({}, "launching"),
        ({"device_start": 1.0}, "device"),
        ({"device_start": 1.0, "device_end": 2.0}, "returning"),
        ({"device_start": 1.0, "device_end": 2.0, "arrived": 3.0}, "committing"),
    ],
)
def test_what_hangs_is_where_the_oldest_step_is(times: dict[str, float], phase: str) -> None:
    progress = warmed_up()
    progress.submitted(200.0)
    progress.launched(StepTimes(launched=200.0, **times))
    progress.launched(StepTimes(launched=200.0))
    assert progress.stall(300.0) == Stall(phase, 100.0)


def test_a_step_that_hangs_is_a_stall_without_any_request_too() -> None:
    progress = warmed_up()
    progress.submitted(200.0)
    progress.launched(StepTimes(launched=200.0, device_start=200.0))
    progress.ended()
    assert progress.stall(300.0) == Stall("device", 100.0)
    progress.stopped()
    assert progress.stall(300.0) is None


def test_the_first_steps_have_more_time() -> None:
    progress = Progress(10.0)
    progress.submitted(0.0)
    progress.launched(StepTimes(launched=0.0))
    assert progress.stall(10.0 * FIRST_PATIENCE) is None
    assert progress.stall(10.0 * FIRST_PATIENCE + 1) is not None


def test_no_patience_is_endless_patience() -> None:
    progress = warmed_up(patience=0.0)
    progress.submitted(0.0)
    assert progress.stall(1e9) is None


async def test_the_heartbeat_measures_how_late_the_loop_is() -> None:
    lags: list[float] = []
    heartbeat = Heartbeat(lags.append, interval=0.02)
    heartbeat.start()
    await asyncio.sleep(0.05)
    before = len(lags)
    assert before >= 1
    time.sleep(0.2)  # noqa: ASYNC251 - the loop is to hang
    await asyncio.sleep(0.01)
    assert max(lags[before:]) >= 0.15
    heartbeat.stop()
    count = len(lags)
    await asyncio.sleep(0.05)
    assert len(lags) == count


async def test_a_loop_that_hangs_is_named_with_the_place_where_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heartbeat = Heartbeat(lambda _: None, interval=0.02)
    watchdog = Watchdog(Progress(0.2), heartbeat, 0.2)
    heartbeat.start()
    watchdog.start()

    def hang_here_on_purpose() -> None:
        deadline = time.monotonic() + 30
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        # The thread looks again and again.
        time.sleep(0.6)

    hang_here_on_purpose()
    watchdog.stop()
    heartbeat.stop()
    # Once, though the thread looked at it many times.
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert re.search(r"the event loop has not turned for \d+\.\d", record.message)
    assert "in hang_here_on_purpose" in (record.stack_info or "")


async def test_a_step_that_hangs_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    progress = warmed_up(patience=0.1)
    progress.submitted(time.monotonic())
    progress.launched(StepTimes(launched=1.0, device_start=1.0))
    heartbeat = Heartbeat(lambda _: None, interval=0.02)
    watchdog = Watchdog(progress, heartbeat, 0.1)
    heartbeat.start()
    watchdog.start()
    async with asyncio.timeout(30):
        while not any("no step" in record.message for record in caplog.records):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.4)
    watchdog.stop()
    heartbeat.stop()
    (record,) = (record for record in caplog.records if "no step" in record.message)
    assert "what hangs is device" in record.message


async def test_an_engine_whose_device_hangs_says_so_and_recovers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FIRST_PATIENCE", 1.0)
    let_go = threading.Event()
    compute = StepComputer.compute
    steps = 0

    def hanging_compute(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            assert let_go.wait(30)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", hanging_compute)
    config = small_config(checkpoint, observability__stall_seconds=0.3)
    async with AsyncEngine.open(config) as engine:
        task = asyncio.create_task(
            engine.generate([5, 6, 7], SamplingParams(max_tokens=10, ignore_eos=True))
        )
        # A slow machine's first steps may seem to hang too.
        async with asyncio.timeout(60):
            while (stall := engine.stall) is None or steps < 3 or stall.phase != "device":
                await asyncio.sleep(0.01)
        assert engine.metrics.value("slipstream_stalled_seconds") > 0.3
        let_go.set()
        assert len((await task).token_ids) == 10
        assert engine.stall is None
        assert_idle(engine)


async def test_the_watchdog_ends_with_its_engine(checkpoint: Path) -> None:
    def watchdogs() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if "watchdog" in thread.name]

    before = len(watchdogs())
    async with AsyncEngine.open(small_config(checkpoint, observability__stall_seconds=0.4)):
        assert len(watchdogs()) == before + 1
    deadline = time.monotonic() + 30
    while len(watchdogs()) > before:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    async with AsyncEngine.open(small_config(checkpoint, observability__stall_seconds=0)):
        assert len(watchdogs()) == before


async def test_there_is_a_line_with_figures_while_there_is_work(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "src")
    config = small_config(checkpoint, observability__stats_interval=0.05)
    async with AsyncEngine.open(config) as engine:
        await engine.generate([5, 6, 7], SamplingParams(max_tokens=30, ignore_eos=True))
        await asyncio.sleep(0.2)
        lines = [r.message for r in caplog.records if r.name == "src.engine.telemetry.stats_line"]
        assert any("generation" in line and " bubble " in line for line in lines)
        assert not any("drafts" in line for line in lines)
        caplog.clear()
        await asyncio.sleep(0.2)
        assert not [r for r in caplog.records if r.name == "src.engine.telemetry.stats_line"]
