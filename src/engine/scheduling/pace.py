"""Decides when the next step is planned while one runs."""

from __future__ import annotations

from typing import Final

from src.core.plan import StepPlan
from src.engine.scheduling.scheduler import Scheduler

# The next step is planned at this part of the running step's forecast duration, less this many
# seconds: the step may end earlier than forecast, and the loop may be late.
_MOST: Final = 0.875
_LEAD: Final = 0.003
# A step planned too late multiplies that part by `_RETREAT`. One in time adds `_ADVANCE` to it.
_RETREAT: Final = 0.8
_ADVANCE: Final = 0.01
# Seconds; a shorter delay is not worth a timer.
_LEAST: Final = 0.001
# Factor on the weight of older steps at each new one: about the last thirty steps count.
_MEMORY: Final = 0.97
_MIN_STEPS: Final = 4
# Seconds; measured durations are raised to this, since the weight is their inverse.
_QUICKEST: Final = 1e-5


class Pace:
    """Forecasts how long a step takes, so that the next one is planned just before its end.

    A plan on the device's queue cannot change: a request that arrives meanwhile joins the step
    after it. A plan that is made late includes all requests that arrived during the running step,
    and still reaches the device in time. If it comes too late, the device waits for a turn of the
    loop. That happens when the forecast was too long, planning was slow or the loop was busy. Then
    later steps are planned earlier, until enough of them were in time.
    """

    def __init__(self) -> None:
        # Decode is bound by reading weights, prefill by arithmetic: each has its own forecast.
        # So has a step that verifies drafts; the plan does not know how many there are.
        self._decode, self._prefill, self._verify = _Line(), _Line(), _Line()
        self._part = _MOST
        self._is_timed = False

    def decide(
        self, scheduler: Scheduler, running: StepPlan | None, start: float, now: float
    ) -> float:
        """Seconds until the next plan should be made; 0 is now. Call it before every plan.

        Parameters
        ----------
        running
            The last launched step, ``None`` if no step is in flight.
        start
            When the device began it.
        """
        was_timed, self._is_timed = self._is_timed, False
        if running is None:
            if was_timed and scheduler.has_work:
                self.missed()
            return 0.0
        # Without a free row no new request could join, so waiting gains nothing.
        if not scheduler.has_free_row:
            return 0.0
        delay = self.wait(running, start, now)
        self._is_timed = delay > 0
        if was_timed and not self._is_timed:
            self.met()
        return delay

    def met(self) -> None:
        """Note that a delayed plan was made while the step before it still ran."""
        self._part = min(_MOST, self._part + _ADVANCE)

    def missed(self) -> None:
        """Note that the running step ended before the delayed plan was made."""
        self._part *= _RETREAT

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Note how many seconds a step took on the device."""
        drafts = plan.num_drafts
        line = self._line_of(plan, drafts)
        line.add(plan.num_tokens - drafts, max(seconds, _QUICKEST))

    def forecast(self, plan: StepPlan) -> float:
        """Seconds that a step will take; 0 until enough steps of its kind were observed."""
        drafts = plan.num_drafts
        return self._line_of(plan, drafts).at(plan.num_tokens - drafts)

    def wait(self, running: StepPlan, start: float, now: float) -> float:
        """Seconds until the next step is planned, if ``running`` began at ``start``; 0 is now."""
        delay = start + self._part * self.forecast(running) - _LEAD - now
        return delay if delay >= _LEAST else 0.0

    def _line_of(self, plan: StepPlan, drafts: int) -> _Line:
        if plan.num_tokens - drafts > len(plan.rows):
            return self._prefill
        return self._verify if drafts else self._decode


class _Line:
    """Step duration as a linear function of its tokens, fitted by weighted least squares.

    Recent steps have more weight. The weight of a step is the inverse of its duration, because the
    durations of long steps vary more.
    """

    def __init__(self) -> None:
        self._count = 0
        # Weighted sums of 1, tokens, seconds, tokens squared, and tokens times seconds.
        self._ones = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        weight = 1.0 / seconds
        self._count += 1
        self._ones = _MEMORY * self._ones + weight
        self._tokens = _MEMORY * self._tokens + weight * tokens
        self._seconds = _MEMORY * self._seconds + weight * seconds
        self._squares = _MEMORY * self._squares + weight * tokens * tokens
        self._products = _MEMORY * self._products + weight * tokens * seconds

    def at(self, tokens: int) -> float:
        if self._count < _MIN_STEPS:
            return 0.0
        mean_tokens, mean_seconds = self._tokens / self._ones, self._seconds / self._ones
        spread = self._squares / self._ones - mean_tokens * mean_tokens
        together = self._products / self._ones - mean_tokens * mean_seconds
        # If all steps had about the same number of tokens, the slope is unknown and taken as 0. A
        # negative slope is noise.
        per_token = max(0.0, together / spread) if spread > 0.5 else 0.0
        return max(0.0, mean_seconds + per_token * (tokens - mean_tokens))
