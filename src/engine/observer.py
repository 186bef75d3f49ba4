"""Everything the engine tells about itself while it runs goes through here.

The loop says what happens; this writes each completion's record, the step timeline and the metrics.
Nothing here decides anything, and nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from src.core.outputs import FinishReason, RequestEvent
from src.core.plan import StepPlan, StepTimes
from src.core.records import ChunkRecord
from src.core.request import Request
from src.engine.scheduler import Scheduler
from src.engine.step_recorder import StepRecorder
from src.engine.streams import Choice
from src.engine.timeline import Timeline
from src.observability.metrics import EngineMetrics


class EngineObserver:
    """Watches one engine's loop.

    Attributes
    ----------
    timeline
        The last steps.
    """

    def __init__(self, metrics: EngineMetrics, *, timeline_steps: int) -> None:
        self.timeline = Timeline(timeline_steps)
        self._steps = StepRecorder(self.timeline)
        self._metrics = metrics
        self._choices: dict[int, Choice] = {}
        # Row -> the completion that holds it, and how many of its tokens are computed as prefill.
        self._rows: dict[int, tuple[Choice, int]] = {}

    def submitted(self, choice: Choice) -> None:
        """A completion was queued."""
        self._choices[choice.request.key] = choice

    def launched(
        self, plan: StepPlan, times: StepTimes, admitted: Sequence[Request], scheduler: Scheduler
    ) -> None:
        """A plan was handed to the device; ``admitted`` run for the first time."""
        self._steps.launched(scheduler)
        if not plan.installs:
            return
        now = times.launch_ended
        for install in plan.installs:
            choice = self._choices[install.request_key]
            choice.record.admitted.append(now)
            self._rows[install.row] = (choice, len(install.token_ids))
        for request in admitted:
            record = self._choices[request.key].record
            self._metrics.on_admitted(now - record.queued, record.trace_id)

    def committed(self, plan: StepPlan, times: StepTimes, started: float) -> None:
        """A step's result was committed; ``started`` is when that began."""
        prefill_rows = prefill_tokens = 0
        for step in plan.rows:
            choice, prefilled = self._rows[step.row]
            if step.start < prefilled:
                prefill_rows += 1
                prefill_tokens += step.num_tokens
                choice.record.chunks.append(
                    ChunkRecord(
                        plan.step_id,
                        step.start,
                        step.num_tokens,
                        times.device_start,
                        times.device_end,
                    )
                )
        self._steps.committed(plan, times, started, prefill_rows, prefill_tokens)

    def publishing(self) -> None:
        """Readers are told of the committed steps from now on."""
        self._steps.publishing()

    def delivered(self, choice: Choice, event: RequestEvent) -> None:
        """An event of a completion was put into its stream."""
        if not event.token_ids:
            return
        now, record = time.monotonic(), choice.record
        if record.first_token is None:
            record.first_token = now
            record.cached_tokens = event.cached_tokens
            self._metrics.on_first_token(record, len(choice.request.prompt_token_ids))
        previous = record.last_token
        itl = None if previous is None else now - previous
        self._metrics.on_tokens(len(event.token_ids), itl, record.trace_id)
        record.last_token = now
        record.num_tokens = choice.num_tokens

    def ended(
        self, choice: Choice, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """A completion ended; nothing more is told about it."""
        record = choice.record
        record.ended, record.finish_reason, record.error = time.monotonic(), reason, error
        del self._choices[choice.request.key]
        self._metrics.on_finished(
            record,
            prompt_tokens=len(choice.request.prompt_token_ids),
            max_tokens=choice.request.max_tokens,
        )

    def turned(self, scheduler: Scheduler) -> None:
        """The loop has turned once: write down its steps, and who lost its row."""
        for record in self._steps.published():
            self._metrics.on_step(record)
        if preempted := scheduler.take_preempted():
            now = time.monotonic()
            for key in preempted:
                if (choice := self._choices.get(key)) is not None:
                    choice.record.preempted.append(now)

    def settled(self) -> None:
        """There is nothing left to do: the device's wait from now on is nobody's fault."""
        self._steps.settled()

    def stopped(self) -> None:
        """The loop serves nobody any more."""
        self._metrics.on_stopped()
