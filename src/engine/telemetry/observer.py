"""The engine loop's observer, which all telemetry of a running engine goes through.

The loop reports events; the observer writes each completion's record, the step timeline and the
metrics. It makes no decisions and never blocks. Its errors must not fail requests, so every method
catches its own.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from src.core.config import ObservabilitySection
from src.core.outputs import FinishReason, RequestEvent
from src.core.plan import StepPlan, StepTimes
from src.core.records import ChunkRecord
from src.core.request import Request
from src.core.views import PlanView
from src.engine.requests.streams import Choice
from src.engine.scheduling.scheduler import Scheduler
from src.engine.telemetry.health import Progress
from src.engine.telemetry.request_tracks import RequestTracks
from src.engine.telemetry.step_recorder import StepRecorder
from src.engine.telemetry.timeline import Timeline
from src.observability.metrics import EngineMetrics
from src.observability.request_log import log_request
from src.observability.tracing import RequestTrace, Telemetry

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., None])

# Seconds between two log lines about errors in the observer.
_REPORT_INTERVAL = 60.0
_KEPT_PLANS = 64


def _contained(method: Method) -> Method:
    @functools.wraps(method)
    def contained(self: EngineObserver, *arguments: Any) -> None:
        try:
            method(self, *arguments)
        # Every error is caught, so that the loop goes on.
        except Exception as error:
            self._report(error)

    return cast(Method, contained)


class EngineObserver:
    """Watches one engine's loop.

    Attributes
    ----------
    timeline
        The last steps.
    progress
        Whether pending work gets done.
    requests
        The unfinished completions, and the last ended ones.
    plans
        The last plans, without tokens, since these are whole prompts.
    """

    def __init__(
        self, metrics: EngineMetrics, section: ObservabilitySection, telemetry: Telemetry
    ) -> None:
        self.timeline = Timeline(section.timeline_steps)
        self.progress = Progress(section.stall_seconds)
        self._logs_requests = section.log_requests
        self._next_report = 0.0
        self._steps = StepRecorder(self.timeline)
        self._metrics = metrics
        self._telemetry = telemetry
        # Step with a sampled span -> traces of the requests that it served.
        self._served: dict[int, list[RequestTrace]] = {}
        self._choices: dict[int, Choice] = {}
        self.requests = RequestTracks(self._choices, section.timeline_requests)
        self.plans: deque[PlanView] = deque(maxlen=_KEPT_PLANS)
        # Of the last admitted completion: the seconds that it waited, and when it was admitted.
        self._last_wait = self._last_admitted = 0.0
        # Row -> the completion that holds it, and the number of tokens that it computes as prefill.
        self._rows: dict[int, tuple[Choice, int]] = {}
        # Key -> the last row of the completion.
        self._row_of: dict[int, int] = {}
        # Ids of the last launched and the last committed step. Ended completions as (last step that
        # may name it, row, completion).
        self._last_launched = self._last_committed = 0
        self._leaving: deque[tuple[int, int, Choice]] = deque()

    def queue_wait(self, now: float) -> float:
        """Estimated seconds in a full queue: the last wait, plus the time since that admission."""
        return self._last_wait + max(0.0, now - self._last_admitted) if self._last_admitted else 0.0

    @_contained
    def submitted(self, choice: Choice) -> None:
        """A completion was queued."""
        self.progress.submitted(choice.record.queued)
        self._choices[choice.request.key] = choice
        if choice.index == 0 and choice.request.pooling is None:
            self._metrics.on_submitted(choice.request.params.n)

    @_contained
    def launched(
        self, plan: StepPlan, times: StepTimes, admitted: Sequence[Request], scheduler: Scheduler
    ) -> None:
        """A plan was launched; ``admitted`` are the requests that run for the first time."""
        self.progress.launched(times)
        self._steps.launched(scheduler)
        self.plans.append(PlanView.of(plan))
        self._last_launched = plan.step_id
        if not plan.installs:
            return
        # `launched`, not the time now: the device may begin before the launching call returns.
        now = times.launched
        for install in plan.installs:
            choice = self._choices[install.request_key]
            choice.record.admitted.append(now)
            # After a preemption the completion no longer holds its previous row.
            self._vacate(self._row_of.get(install.request_key), choice)
            self._row_of[install.request_key] = install.row
            self._rows[install.row] = (choice, len(install.token_ids))
        for request in admitted:
            record = self._choices[request.key].record
            self._last_wait, self._last_admitted = now - record.queued, now
            self._metrics.on_admitted(self._last_wait, record.trace_id)

    @_contained
    def committed(
        self,
        plan: StepPlan,
        times: StepTimes,
        started: float,
        drafted: tuple[int, int] = (0, 0),
    ) -> None:
        """A step's result was committed; ``started`` is when the commit began.

        ``drafted``: drafts that it has verified, and how many of them were right.
        """
        self.progress.committed(started)
        prefill_rows = prefill_tokens = unfinished_rows = pooled_rows = starts = more_pairs = 0
        for step in plan.rows:
            choice, prefilled = self._rows[step.row]
            starts += step.start
            if step.start < prefilled:
                # The last token of a prompt may come with drafts.
                num_tokens = step.num_tokens - step.drafts
                prefill_rows += 1
                prefill_tokens += num_tokens
                unfinished_rows += not (step.samples or step.pools)
                pooled_rows += step.pools
                # Pairs of all its tokens but the last, which attends to the whole row.
                more_pairs += (num_tokens - 1) * (2 * step.start + num_tokens) // 2
                choice.record.chunks.append(
                    ChunkRecord(
                        plan.step_id,
                        step.start,
                        num_tokens,
                        times.device_start,
                        times.device_end,
                    )
                )
        work = (prefill_rows, prefill_tokens, unfinished_rows, pooled_rows, starts, more_pairs)
        self._steps.committed(plan, times, started, work, drafted)
        if self._telemetry.samples_step():
            choices = (self._rows[step.row][0] for step in plan.rows)
            self._served[plan.step_id] = [c.trace for c in choices if c.trace is not None]
        self._last_committed = plan.step_id
        while self._leaving and self._leaving[0][0] <= plan.step_id:
            _, row, choice = self._leaving.popleft()
            self._vacate(row, choice)

    @_contained
    def step_failed(self) -> None:
        """A step failed, but the device still works."""
        self._metrics.on_step_failed()

    @_contained
    def row_failed(self, reason: str) -> None:
        """One request of a step cannot go on; ``reason`` is one of `ROW_FAILURES`."""
        self._metrics.on_row_failed(reason)

    @_contained
    def publishing(self) -> None:
        """Publishing of the committed steps begins."""
        self._steps.publishing()

    @_contained
    def delivered(self, choice: Choice, event: RequestEvent) -> None:
        """An event of a completion was put into its stream."""
        if event.vector is not None:
            choice.record.cached_tokens = event.cached_tokens
            self._metrics.on_vector(choice.record, len(choice.request.prompt_token_ids))
        if not event.token_ids:
            return
        now, record = time.monotonic(), choice.record
        previous, record.last_token = record.last_token, now
        record.num_tokens = choice.num_tokens
        if record.token_times is not None:
            record.token_times.append(now)
        if previous is None:
            record.first_token = now
            record.cached_tokens = event.cached_tokens
            self._metrics.on_first_token(record, len(choice.request.prompt_token_ids))
            self._metrics.on_tokens(len(event.token_ids), None)
        else:
            self._metrics.on_tokens(len(event.token_ids), now - previous, record.trace_id)

    @_contained
    def ended(
        self, choice: Choice, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """A completion ended. It is not reported again."""
        self.progress.ended()
        del self._choices[choice.request.key]
        row = self._row_of.pop(choice.request.key, None)
        if row is not None and self._last_committed < self._last_launched:
            self._leaving.append((self._last_launched, row, choice))
        else:
            self._vacate(row, choice)
        record, request = choice.record, choice.request
        record.ended, record.finish_reason, record.error = time.monotonic(), reason, error
        self.requests.ended(choice)
        self._metrics.on_finished(
            record,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=None if request.pooling is not None else request.max_tokens,
        )
        if request.pooling is None and (longest := choice.longest_of_request) is not None:
            self._metrics.on_request_finished(longest)
        if self._logs_requests:
            log_request(
                record,
                request_id=choice.request_id,
                index=choice.index,
                prompt_tokens=len(request.prompt_token_ids),
                task=request.task,
            )

    def _vacate(self, row: int | None, choice: Choice) -> None:
        """Forget a row's completion, if it still is ``choice``."""
        if row is not None and row in self._rows and self._rows[row][0] is choice:
            del self._rows[row]

    @_contained
    def turned(self, scheduler: Scheduler) -> None:
        """The loop has turned once: record its published steps and its preemptions."""
        for record in self._steps.published():
            self._metrics.on_step(record)
            if self._served and (served := self._served.pop(record.step_id, None)) is not None:
                self._telemetry.step(record, served)
        if preempted := scheduler.take_preempted():
            now = time.monotonic()
            for key in preempted:
                if (choice := self._choices.get(key)) is not None:
                    choice.record.preempted.append(now)

    @_contained
    def settled(self) -> None:
        """No work is left, so the device's idle time from now on is not a bubble."""
        self._steps.settled()

    @_contained
    def stopped(self) -> None:
        """The loop has ended."""
        self.progress.stopped()
        self._metrics.on_stopped()

    def _report(self, error: Exception) -> None:
        self._metrics.on_observer_error()
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + _REPORT_INTERVAL
            logger.error("what watches the engine failed; requests go on", exc_info=error)
