"""When a step on a GPU counts as begun: with events that are no GPU's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.core.plan import StepResult, StepTimes
from src.engine import startup
from src.engine.devices import host
from src.engine.devices.cuda import CudaSpan
from src.engine.execution.graphs import decode
from src.engine.execution.row_state import RowState
from tests.support.engines import assert_idle, small_config
from tests.support.fake_capture import FakeCapture

pytestmark = pytest.mark.anyio


class Clock:
    """Milliseconds of a device's stream."""

    now = 0.0


class Event:
    """Has the time of its last recording."""

    def __init__(self, **_: Any) -> None:
        self._at = -1.0

    def record(self) -> None:
        self._at = Clock.now

    def synchronize(self) -> None:
        assert self._at >= 0

    def elapsed_time(self, end: Event) -> float:
        return end._at - self._at


class Copied:
    """What a step leaves."""

    def to_host(self) -> Copied:
        Clock.now += 0.5
        return self


@pytest.fixture
def waiter(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Clock, "now", 0.0)
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize(("says_so", "busy"), [(True, 4.5), (False, 34.5)])
async def test_a_step_is_busy_from_where_its_arithmetic_begins(
    waiter: ThreadPoolExecutor, says_so: bool, busy: float
) -> None:
    times, posted, there = StepTimes(launched=0.0), [], threading.Event()
    span = CudaSpan(times, waiter)
    Clock.now += 30.0  # a host that is slow with rows and inputs
    if says_so:
        span.computes()
    Clock.now += 4.0
    span.copy_out(Copied())

    def post(outcome: Any) -> None:
        posted.append(outcome)
        there.set()

    span.deliver(lambda: StepResult(1, []), post)
    assert there.wait(10)
    assert posted == [StepResult(1, [])]
    assert 1000 * (times.device_end - times.device_start) == pytest.approx(busy, abs=0.01)


@pytest.mark.parametrize("graphs", ["off", "wait"])
async def test_arithmetic_begins_behind_rows_and_inputs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    """Once a step, behind every upload, before the forward pass and whatever replays."""
    order: list[str] = []

    def noting(owner: Any, name: str, word: str) -> None:
        function = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            order.append(word)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    noting(host.HostSpan, "__init__", "begin")
    noting(host.HostSpan, "computes", "computes")
    noting(host.HostSpan, "copy_out", "copy_out")
    noting(RowState, "install", "upload")
    noting(RowState, "append_blocks", "upload")
    noting(decode, "upload_into", "upload")
    noting(RowState, "gather", "gather")
    monkeypatch.setattr(startup, "capture_backend", lambda device: FakeCapture())
    config = small_config(
        checkpoint,
        compile__enforce_eager=graphs == "off",
        compile__startup="off",
        compile__cuda_graphs=graphs,
        compile__cuda_graph_max_tokens=16,
    )
    async with AsyncEngine.open(config) as engine:
        order.clear()
        await engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=20))
        assert_idle(engine)
    steps = "\n".join(order).split("begin\n")[1:]
    assert len(steps) >= 20
    for step in steps:
        _, after = step.split("computes\n")
        assert "upload" not in after
        assert "gather" not in after
        assert after.startswith("copy_out")
    assert any("upload" in step for step in steps)
