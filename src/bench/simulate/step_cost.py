"""The cost of a step as a linear function of its work, fitted to recorded steps.

A step has host parts and a device part, which overlap between steps as the engine's pipeline
allows. Each part has a cost of its own; the simulation (``engine.py``) decides which part waits for
which.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from src.core.errors import ConfigError
from src.core.steps import StepRecord

VERSION: Final = 1
# Fewer steps do not determine the coefficients.
MIN_STEPS: Final = 30
_NUM_SPREAD: Final = 256
# What readers are told of.
_DELIVERED: Final = ("sampled_rows", "pooled_rows")
# Minimal duration of a step in seconds, whatever its record says.
_LEAST: Final = 1e-9


class Work(msgspec.Struct, frozen=True, gc=False):
    """The work of a step; the fields are those of `StepRecord`.

    ``prefill_rows`` are rows that compute prompt tokens. ``attended_pairs`` only counts pairs
    beyond ``context_tokens``.
    """

    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    context_tokens: int
    attended_pairs: int
    sampled_rows: int
    pooled_rows: int = 0
    drafted_tokens: int = 0

    @classmethod
    def of(cls, step: StepRecord) -> Work:
        """The work of a recorded step."""
        return cls(
            step.decode_rows,
            step.num_rows - step.decode_rows,
            step.prefill_tokens,
            step.context_tokens,
            step.attended_pairs - step.context_tokens,
            step.sampled_rows,
            step.pooled_rows,
            step.drafted_tokens,
        )


class Price(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Seconds per step, and per unit of each kind of work."""

    step: float = 0.0
    decode_rows: float = 0.0
    prefill_rows: float = 0.0
    prefill_tokens: float = 0.0
    context_tokens: float = 0.0
    attended_pairs: float = 0.0
    sampled_rows: float = 0.0
    pooled_rows: float = 0.0
    drafted_tokens: float = 0.0

    def seconds(self, work: Work) -> float:
        """The time that this work takes."""
        return (
            self.step
            + self.decode_rows * work.decode_rows
            + self.prefill_rows * work.prefill_rows
            + self.prefill_tokens * work.prefill_tokens
            + self.context_tokens * work.context_tokens
            + self.attended_pairs * work.attended_pairs
            + self.sampled_rows * work.sampled_rows
            + self.pooled_rows * work.pooled_rows
            + self.drafted_tokens * work.drafted_tokens
        )


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of steps of one engine on one machine.

    Attributes
    ----------
    device
        Device time, in seconds.
    plan, commit, publish
        Event-loop time, in seconds: to plan and launch a step, to commit its result, to deliver its
        tokens.
    dispatch
        Seconds from a launch, or from the end of the previous step, until the device begins.
    handover
        Seconds from the device's end until the event loop begins to commit, per token of the
        previous step and per step. It includes the readers' work on their tokens.
    submit
        Event-loop seconds per request.
    spread
        Deviations of device times from their predicted cost, divided by its square root, at evenly
        spaced quantiles; 0 on average. The unit is the square root of a second, because the scatter
        of a sum of many parts grows that way.
    num_steps, error
        Number of fitted steps, and the median relative error of the device's cost.
    drafted, accepted
        Drafts of a decoding row in a step, and how many of them were right, on average.
    """

    device: Price
    plan: Price
    commit: Price
    publish: Price
    handover: Price
    dispatch: float
    submit: float
    spread: list[float]
    num_steps: int
    error: float
    drafted: float = 0.0
    accepted: float = 0.0
    version: int = VERSION


class FitError(ConfigError):
    """There is too little data to fit costs to."""


def fit(steps: Sequence[StepRecord], submit: float = 0.0) -> StepCost:
    """Fit costs to recorded steps, oldest first.

    Parameters
    ----------
    submit
        Event-loop seconds per request, which step records do not contain.

    Raises
    ------
    FitError
        There are too few steps, or their records lack the number of attended pairs.
    """
    if len(steps) < MIN_STEPS:
        raise FitError(f"{len(steps)} steps are recorded, a fit needs {MIN_STEPS}")
    if not any(step.context_tokens for step in steps):
        raise FitError("these steps do not say what they attended to: record them anew")
    works = [Work.of(step) for step in steps]
    on_device = (
        "decode_rows",
        "prefill_rows",
        "prefill_tokens",
        "context_tokens",
        "attended_pairs",
        "pooled_rows",
        "drafted_tokens",
    )
    device = _price(works, on_device, [s.device_end - s.device_start for s in steps])
    in_rows = ("decode_rows", "prefill_rows", "drafted_tokens")
    decoded = max(1, sum(work.decode_rows for work in works))
    turns = [a for a, b in pairwise(steps) if a.publish_started != b.publish_started]
    turns.append(steps[-1])
    dispatched = [b.device_start - max(a.device_end, b.launched) for a, b in pairwise(steps)]
    times = [
        (s.device_end - s.device_start, max(device.seconds(w), _LEAST))
        for s, w in zip(steps, works, strict=True)
    ]
    return StepCost(
        device=device,
        plan=_price(
            works, (*in_rows, "prefill_tokens"), [s.launch_ended - s.planned for s in steps]
        ),
        commit=_price(works, in_rows, [s.committed - s.commit_started for s in steps]),
        publish=_price(
            [Work.of(s) for s in turns],
            _DELIVERED,
            [s.published - s.publish_started for s in turns],
        ),
        handover=_handover(steps),
        dispatch=max(0.0, sum(dispatched) / len(dispatched)),
        submit=submit,
        spread=_spread([(real - price) / math.sqrt(price) for real, price in times]),
        num_steps=len(steps),
        error=statistics.median(abs(price / max(real, _LEAST) - 1) for real, price in times),
        drafted=sum(step.drafted_tokens for step in steps) / decoded,
        accepted=sum(step.accepted_tokens for step in steps) / decoded,
    )


def _handover(steps: Sequence[StepRecord]) -> Price:
    """From the later of the device's end and the previous delivery until committing begins."""
    pairs = [(a, b) for a, b in pairwise(steps) if a.publish_started != b.publish_started]
    waits = [max(0.0, b.commit_started - max(b.device_end, a.published)) for a, b in pairs]
    if len(pairs) < MIN_STEPS // 2:
        return Price()
    return _price([Work.of(a) for a, _ in pairs], _DELIVERED, waits)


def _price(works: Sequence[Work], names: Sequence[str], seconds: Sequence[float]) -> Price:
    import numpy as np

    from src.bench.simulate.least_squares import prices

    # Of work that no step had, nothing can be said.
    names = [name for name in names if any(getattr(work, name) for work in works)]
    columns = [[1.0] * len(works)]
    columns += [[float(getattr(work, name)) for work in works] for name in names]
    found = prices(np.array(columns).T, np.maximum(np.array(seconds), 0.0))
    return Price(**dict(zip(("step", *names), found.tolist(), strict=True)))


def _spread(residuals: Sequence[float]) -> list[float]:
    ordered = sorted(residuals)
    count = min(_NUM_SPREAD, len(ordered))
    # From the middle of each part, because the extremes would be over-represented.
    picked = [ordered[int(len(ordered) * (i + 0.5) / count)] for i in range(count)]
    mean = sum(picked) / count
    return [value - mean for value in picked]
