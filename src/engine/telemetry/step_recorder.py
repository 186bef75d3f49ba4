"""Makes each step's record in the timeline from the loop's reports.

A few figures are taken when the step is launched, others when it is committed, and the last one
when it is published.
"""

from __future__ import annotations

import time
from collections import deque

from src.core.plan import StepPlan, StepTimes
from src.core.steps import StepRecord
from src.engine.scheduling.scheduler import Scheduler
from src.engine.telemetry.timeline import Timeline

# Prefill rows, prefill tokens, prefill rows with more chunks to come, and those that end with
# numbers in place of a token; the sum of all rows' start positions; pairs of a token and an
# attended position, without each row's last token.
Work = tuple[int, int, int, int, int, int]
# Plain tuples, because they are made in every step. Taken after a launch: running and waiting
# requests, KV usage, new preemptions.
_Planned = tuple[int, int, float, int]
# A committed step that is not published yet: plan, times, figures of its launch, begin and end of
# its commit, seconds that the device waited, work, drafts and right drafts.
_Committed = tuple[StepPlan, StepTimes, _Planned, float, float, float, Work, tuple[int, int]]


class StepRecorder:
    """Writes a timeline. Steps must be committed in launch order."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._planned: deque[_Planned] = deque()
        self._committed: list[_Committed] = []
        self._preemptions = 0
        self._publish_started = 0.0
        # When the device ended the previous step; 0 after a time without work.
        self._device_end = 0.0

    def launched(self, scheduler: Scheduler) -> None:
        """The last planned step was launched."""
        preemptions = scheduler.stats.preemptions
        self._planned.append(
            (
                scheduler.num_running,
                scheduler.num_waiting,
                scheduler.kv_usage,
                preemptions - self._preemptions,
            )
        )
        self._preemptions = preemptions

    def committed(
        self,
        plan: StepPlan,
        times: StepTimes,
        started: float,
        work: Work,
        drafted: tuple[int, int],
    ) -> None:
        """The oldest launched step was committed; ``started`` is when the commit began."""
        idle = max(0.0, times.device_start - self._device_end) if self._device_end else 0.0
        self._device_end = times.device_end
        self._committed.append(
            (plan, times, self._planned.popleft(), started, time.monotonic(), idle, work, drafted)
        )

    def publishing(self) -> None:
        """Publishing of the committed steps begins."""
        if self._committed:
            self._publish_started = time.monotonic()

    def published(self) -> list[StepRecord]:
        """Publishing has ended: add the records of these steps to the timeline, and return them."""
        if not self._committed:
            return []
        now = time.monotonic()
        committed, self._committed = self._committed, []
        records = [self._record(step, now) for step in committed]
        for record in records:
            self._timeline.add(record)
        return records

    def settled(self) -> None:
        """No work is left, so the device's idle time from now on is not a bubble."""
        self._device_end = 0.0

    def _record(self, step: _Committed, published: float) -> StepRecord:
        plan, times, planned, started, ended, idle_before, work, (drafted, accepted) = step
        running, waiting, kv_usage, preemptions = planned
        prefill_rows, prefill_tokens, unfinished_rows, pooled_rows, starts, more_pairs = work
        cached = 0
        if plan.installs:
            installed = {install.row for install in plan.installs}
            # An installed row begins behind its prefix cache hits.
            cached = sum(row.start for row in plan.rows if row.row in installed)
        num_rows = len(plan.rows)
        num_tokens = prefill_tokens + num_rows - prefill_rows + drafted
        return StepRecord(
            step_id=plan.step_id,
            planned=times.planned,
            plan_ended=times.plan_ended,
            launched=times.launched,
            launch_ended=times.launch_ended,
            device_start=times.device_start,
            device_end=times.device_end,
            arrived=times.arrived,
            commit_started=started,
            committed=ended,
            publish_started=self._publish_started,
            published=published,
            idle_before=idle_before,
            num_rows=num_rows,
            num_tokens=num_tokens,
            decode_rows=num_rows - prefill_rows,
            prefill_tokens=prefill_tokens,
            sampled_rows=num_rows - unfinished_rows - pooled_rows,
            installed_rows=len(plan.installs),
            cached_tokens=cached,
            preemptions=preemptions,
            running=running,
            waiting=waiting,
            kv_usage=kv_usage,
            context_tokens=starts + num_tokens,
            attended_pairs=starts + num_tokens + more_pairs,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            pooled_rows=pooled_rows,
        )
