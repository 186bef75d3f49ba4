"""The handle of one launched step."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from src.core.plan import StepPlan, StepResult, StepTimes


@dataclass
class InFlight:
    """Owns a step from its launch until its result is committed.

    ``future`` resolves on the event loop when the step's copy-out has arrived.
    """

    plan: StepPlan
    future: asyncio.Future[StepResult]
    times: StepTimes
    # Keeps the step's device tensors alive until the copy-out has run.
    holds: list[object] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether the result, or the step's failure, has arrived."""
        return self.future.done()


def failed_step(plan: StepPlan, error: Exception) -> InFlight:
    """A step that never reached the device."""
    future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    now = time.monotonic()
    times = StepTimes(launched=now, device_start=now, device_end=now, arrived=now)
    return InFlight(plan, future, times)
