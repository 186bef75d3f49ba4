"""Everything the engine tells about itself while it runs goes through here.

The loop says what happens; this writes each completion's record, the step timeline and the metrics.
Nothing here decides anything, and nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from src.core.outputs import FinishReason, RequestEvent
from src.core.plan import StepPlan, StepTimes
from src.core.records import ChunkRecord
from src.core.request import Request
from src.engine.scheduler import Scheduler
from src.engine.streams import Choice
from src.engine.timeline import StepRecord, Timeline
from src.observability.metrics import EngineMetrics


@dataclass(frozen=True)
class Reported:
    """The scheduler's counters as the metrics already have them."""

    preemptions: int = 0
    queries: int = 0
    hits: int = 0


class EngineObserver:
    """Watches one engine's loop.

    Attributes
    ----------
    timeline
        The last steps.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self.timeline = Timeline()
        self._metrics = metrics
        self._choices: dict[int, Choice] = {}
        # Row -> the completion that holds it, and how many of its tokens are computed as prefill.
        self._rows: dict[int, tuple[Choice, int]] = {}
        self._reported = Reported()
        self._was_idle = True

    def submitted(self, choice: Choice) -> None:
        """A completion was queued."""
        self._choices[choice.request.key] = choice

    def launched(self, plan: StepPlan, admitted: Sequence[Request]) -> None:
        """A plan was handed to the device; ``admitted`` run for the first time."""
        if not plan.installs:
            return
        now = time.monotonic()
        for install in plan.installs:
            choice = self._choices[install.request_key]
            choice.record.admitted.append(now)
            self._rows[install.row] = (choice, len(install.token_ids))
        for request in admitted:
            self._metrics.on_admitted(now - request.arrival)

    def committed(self, plan: StepPlan, times: StepTimes, planned: float) -> None:
        """A step's result was committed; ``planned`` is when its planning began."""
        last = self.timeline.last
        idle = 0.0
        if last is not None and not self._was_idle:
            idle = max(0.0, times.device_start - last.device_end)
        self._was_idle = False
        for step in plan.rows:
            choice, prefilled = self._rows[step.row]
            if step.start < prefilled:
                choice.record.chunks.append(
                    ChunkRecord(
                        plan.step_id,
                        step.start,
                        step.num_tokens,
                        times.device_start,
                        times.device_end,
                    )
                )
        record = StepRecord(
            step_id=plan.step_id,
            planned=planned,
            launched=times.launched,
            device_start=times.device_start,
            device_end=times.device_end,
            committed=time.monotonic(),
            idle_before=idle,
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
        )
        self.timeline.add(record)
        self._metrics.on_step(record.num_tokens, record.device_end - record.device_start, idle)

    def delivered(self, choice: Choice, event: RequestEvent) -> None:
        """An event of a completion was put into its stream."""
        if not event.token_ids:
            return
        now, record = time.monotonic(), choice.record
        if record.first_token is None:
            record.first_token = now
            record.cached_tokens = event.cached_tokens
            self._metrics.on_first_token(now - record.arrival)
            self._metrics.on_prompt_tokens(len(choice.request.prompt_token_ids))
        previous = record.last_token
        self._metrics.on_tokens(len(event.token_ids), None if previous is None else now - previous)
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
            reason,
            e2e_seconds=record.ended - record.arrival,
            prompt_tokens=len(choice.request.prompt_token_ids),
            output_tokens=choice.num_tokens,
        )

    def turned(self, scheduler: Scheduler) -> None:
        """The loop has turned once: bring gauges and counters up to date."""
        stats, seen = scheduler.stats, self._reported
        self._metrics.set_gauges(scheduler.num_running, scheduler.num_waiting, scheduler.kv_usage)
        if stats.preemptions > seen.preemptions:
            now = time.monotonic()
            for key in scheduler.take_preempted():
                if (choice := self._choices.get(key)) is not None:
                    choice.record.preempted.append(now)
            self._metrics.on_preemption(stats.preemptions - seen.preemptions)
        queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
        if queries > seen.queries:
            self._metrics.on_prefix_cache(queries - seen.queries, hits - seen.hits)
        self._reported = Reported(stats.preemptions, queries, hits)

    def settled(self) -> None:
        """There is nothing left to do: the device's wait from now on is nobody's fault."""
        self._was_idle = True

    def stopped(self) -> None:
        """The loop serves nobody any more."""
        self._metrics.set_gauges(0, 0, 0.0)
