"""The handle of one launched step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from src.core.plan import StepPlan, StepResult


@dataclass
class StepTimes:
    """When things happened to one step, in seconds of ``time.perf_counter``.

    ``device_start`` and ``device_end`` are what the device itself saw; on CUDA they are measured by
    events and anchored at the completion that the host saw.
    """

    launched: float
    device_start: float = 0.0
    device_end: float = 0.0


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
