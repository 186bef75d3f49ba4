"""The handle of one launched step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from src.core.plan import StepPlan, StepResult, StepTimes


@dataclass(slots=True)
class InFlight:
    """Owns a step from its launch until its result is committed.

    Not an asyncio future, because that calls back one turn of the event loop later.
    """

    plan: StepPlan
    times: StepTimes
    # Called on the event loop when the outcome has arrived.
    then: Callable[[], object] | None = None
    # The result, or the error of a failed step, once it has arrived.
    outcome: StepResult | Exception | None = None
    # Keeps the step's device tensors alive until the copy-out has run.
    holds: list[object] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether the result, or the step's failure, has arrived."""
        return self.outcome is not None

    def arrive(self, outcome: StepResult | Exception) -> None:
        """Set the outcome. Call it on the event loop."""
        self.times.arrived = time.monotonic()
        self.outcome = outcome
        if self.then is not None:
            self.then()


def failed_step(plan: StepPlan, error: Exception) -> InFlight:
    """A step that never reached the device."""
    now = time.monotonic()
    times = StepTimes(launched=now, device_start=now, device_end=now, arrived=now)
    return InFlight(plan, times, outcome=error)
