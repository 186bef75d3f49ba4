"""From what the loop says about a step to its record in the timeline.

A few figures are those of the moment at which the step was planned, the others come when it is
committed, and the last one when its readers have been told.
"""

from __future__ import annotations

import time
from collections import deque

from src.core.plan import StepPlan, StepTimes
from src.core.steps import StepRecord
from src.engine.scheduling.scheduler import Scheduler
from src.engine.telemetry.timeline import Timeline

# Rows that compute tokens of prompts, those tokens, and the rows of them with more to come; the
# positions from which all rows start, added up; pairs of a token and a position that it attends to,
# but for each row's last token.
Work = tuple[int, int, int, int, int]
# Plain tuples, since this happens in every step. Once a step was planned: running and waiting
# requests, KV usage, new preemptions.
_Planned = tuple[int, int, float, int]
# A step whose readers are still to be told: plan, times, figures of its planning, when committing
# began and ended, how long the device waited, work.
_Committed = tuple[StepPlan, StepTimes, _Planned, float, float, float, Work]


class StepRecorder:
    """Writes a timeline; steps are launched and committed in the same order."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._planned: deque[_Planned] = deque()
        self._committed: list[_Committed] = []
        self._preemptions = 0
        self._publish_started = 0.0
        # When the device ended the step before; 0 after a time without work.
        self._device_end = 0.0

    def launched(self, scheduler: Scheduler) -> None:
        """The step that was planned last is on the device's queue."""
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

    def committed(self, plan: StepPlan, times: StepTimes, started: float, work: Work) -> None:
        """The oldest launched step was committed, which began at ``started``."""
        idle = max(0.0, times.device_start - self._device_end) if self._device_end else 0.0
        self._device_end = times.device_end
        self._committed.append(
            (plan, times, self._planned.popleft(), started, time.monotonic(), idle, work)
        )

    def publishing(self) -> None:
        """Readers are told of what was committed from now on."""
        if self._committed:
            self._publish_started = time.monotonic()

    def published(self) -> list[StepRecord]:
        """They have been told: the records of these steps, which are in the timeline now."""
        if not self._committed:
            return []
        now = time.monotonic()
        committed, self._committed = self._committed, []
        records = [self._record(step, now) for step in committed]
        for record in records:
            self._timeline.add(record)
        return records

    def settled(self) -> None:
        """There is no work left: the device's wait from now on is nobody's fault."""
        self._device_end = 0.0

    def _record(self, step: _Committed, published: float) -> StepRecord:
        plan, times, planned, started, ended, idle_before, work = step
        running, waiting, kv_usage, preemptions = planned
        prefill_rows, prefill_tokens, unfinished_rows, starts, more_pairs = work
        cached = 0
        if plan.installs:
            installed = {install.row for install in plan.installs}
            # A fresh row begins to compute behind what the cache had.
            cached = sum(row.start for row in plan.rows if row.row in installed)
        num_rows = len(plan.rows)
        num_tokens = prefill_tokens + num_rows - prefill_rows
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
            sampled_rows=num_rows - unfinished_rows,
            installed_rows=len(plan.installs),
            cached_tokens=cached,
            preemptions=preemptions,
            running=running,
            waiting=waiting,
            kv_usage=kv_usage,
            context_tokens=starts + num_tokens,
            attended_pairs=starts + num_tokens + more_pairs,
        )
