"""A loop on a device that answers when the test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from src.core.config import ObservabilitySection
from src.core.errors import SlipstreamError
from src.core.outputs import FinishReason
from src.core.plan import RowResult, StepPlan, StepResult, StepTimes
from src.core.settings import CHECKOUT
from src.core.step_message import StepMessage
from src.engine.execution.in_flight import InFlight
from src.engine.loop import EngineLoop
from src.engine.requests.submission import Submission
from src.engine.scheduling.scheduler import Scheduler
from src.engine.telemetry.observer import EngineObserver
from src.observability.metrics import EngineMetrics
from src.observability.tracing import Telemetry
from src.text import Tokenizer
from tests.engine.scheduling.simulation import make_limits, make_request

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


async def turns() -> None:
    """Everything in the event loop has its turn, however long this takes."""
    for _ in range(100):
        await asyncio.sleep(0)


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


async def answered(harness: Harness, first: int, end: int, seconds: float) -> None:
    """The device answers these steps, each of which is said to have taken so long."""
    for number in range(first, end):
        await harness.until_launched(number + 1)
        step = harness.worker.launched[number]
        step.times.device_end = time.monotonic()
        step.times.device_start = step.times.device_end - seconds
        step.arrive(result_of(step.plan))
        await asyncio.sleep(0)
