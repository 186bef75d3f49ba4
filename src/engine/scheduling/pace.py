"""When the step behind a running one is planned."""

from __future__ import annotations

from typing import Final

from src.core.plan import StepPlan
from src.engine.scheduling.scheduler import Scheduler

# Of a forecast, at most, and seconds before its end: a step may be quicker, and the loop late.
_MOST: Final = 0.875
_LEAD: Final = 0.003
# What is left of that part after a step that came too late, and what each in time gives back.
_RETREAT: Final = 0.8
_ADVANCE: Final = 0.01
# Less is not worth a timer.
_LEAST: Final = 0.001
# What a step still counts for after the next one: thirty steps tell.
_MEMORY: Final = 0.97
_MIN_STEPS: Final = 4
# Seconds that a step takes, whatever its clock says.
_QUICKEST: Final = 1e-5


class Pace:
    """Forecasts how long a step takes, so that the next one is planned just before its end.

    A plan that waits on the device's queue is closed: whoever comes meanwhile joins the step after
    it. Planned late it takes in everybody who came while the step before it ran, and the device
    still has it in time. Where it has not, since a forecast was too long, planning took long or the
    loop was late, it waits for a turn of the loop; and later steps are planned earlier, until
    enough of them were in time.
    """

    def __init__(self) -> None:
        # Rows that decode wait for weights to be read, prompts for arithmetic.
        self._decode, self._prefill = _Line(), _Line()
        self._part = _MOST
        self._is_timed = False

    def decide(
        self, scheduler: Scheduler, running: StepPlan | None, start: float, now: float
    ) -> float:
        """Asked before every plan: seconds until it should be made, 0 is now.

        Parameters
        ----------
        running
            The step that it follows, ``None`` if none runs.
        start
            When that one began.
        """
        was_timed, self._is_timed = self._is_timed, False
        if running is None:
            if was_timed and scheduler.has_work:
                self.missed()
            return 0.0
        # Without a free row nobody who comes could join it.
        if not scheduler.has_free_row:
            return 0.0
        delay = self.wait(running, start, now)
        self._is_timed = delay > 0
        if was_timed and not self._is_timed:
            self.met()
        return delay

    def met(self) -> None:
        """A step was planned late, and while the one before it ran."""
        self._part = min(_MOST, self._part + _ADVANCE)

    def missed(self) -> None:
        """A step was to be planned late, and the one before it has ended by then."""
        self._part *= _RETREAT

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken the device so long."""
        self._line_of(plan).add(plan.num_tokens, max(seconds, _QUICKEST))

    def forecast(self, plan: StepPlan) -> float:
        """Seconds that the device will take; 0 before enough steps of its kind were seen."""
        return self._line_of(plan).at(plan.num_tokens)

    def wait(self, running: StepPlan, start: float, now: float) -> float:
        """Seconds until the step behind one that began at ``start`` is planned; 0 is at once."""
        delay = start + self._part * self.forecast(running) - _LEAD - now
        return delay if delay >= _LEAST else 0.0

    def _line_of(self, plan: StepPlan) -> _Line:
        return self._prefill if plan.num_tokens > len(plan.rows) else self._decode


class _Line:
    """Seconds by tokens: a price per step and one per token, by least squares.

    The last steps count for more than those before, and a step for as much as it was short, since
    long ones scatter more.
    """

    def __init__(self) -> None:
        self._count = 0
        # Weighted sums: of 1, tokens and seconds; of tokens by tokens and by seconds.
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
        # Steps that are all alike do not tell what a token costs; and none makes a step shorter.
        per_token = max(0.0, together / spread) if spread > 0.5 else 0.0
        return max(0.0, mean_seconds + per_token * (tokens - mean_tokens))
