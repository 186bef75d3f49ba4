"""One engine in simulated time: the real scheduler, with clocks for host and device.

::

    host    | commit N-1 | plan N+1, launch | publish N-1 |   idle    | commit N | ...
    device  | .................. step N ................. | ........ step N+1 .......

A turn of the host is a turn of the loop (``src/engine/loop.py``): commit arrived results, launch
until the pipeline is full, deliver tokens. A turn begins when a result arrives, when a request
arrives while the pipeline has room, or when it is time to plan. The device runs steps one after
another.
"""

from __future__ import annotations

import math
import random
from collections import deque
from typing import NamedTuple

from src.bench.simulate.outcome import Journal
from src.bench.simulate.requests import END_TOKEN, SimulatedRequest
from src.bench.simulate.step_cost import StepCost, Work
from src.core.errors import SlipstreamError
from src.core.outputs import RequestEvent
from src.core.plan import RowResult, RowStep, StepPlan, StepResult
from src.engine.scheduling.pace import Pace
from src.engine.scheduling.scheduler import Scheduler, SchedulerLimits

# Scatter makes no step faster than this share of its cost.
_QUICKEST = 0.25
_MOST_OWED = 64.0
_TOKEN = [0]
_END = [END_TOKEN]
_NOTHING: list[int] = []
# What stands in it makes no difference.
_VECTOR = b""


class _Step(NamedTuple):
    """A launched step: when the device computes it, and when the host can commit its result."""

    plan: StepPlan
    result: StepResult
    work: Work
    start: float
    end: float
    arrives: float


class SimulatedEngine:
    """A scheduler whose steps take the time that a cost model gives.

    Parameters
    ----------
    journal
        Records what happens to requests.
    depth
        Maximal number of steps in the device's queue.
    seed
        Seed for the scatter of device times, which is that of the fitted steps; ``None`` for no
        scatter.

    Attributes
    ----------
    busy_seconds
        How long the device has computed.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cost: StepCost,
        journal: Journal,
        *,
        depth: int = 2,
        seed: int | None = 0,
    ) -> None:
        self.scheduler = Scheduler(limits)
        self.busy_seconds = 0.0
        self._cost = cost
        self._journal = journal
        self._depth = depth
        self._spread = None if seed is None else cost.spread
        self._random = random.Random(seed).random
        # Times until which host and device are busy.
        self._host = 0.0
        self._device = 0.0
        self._in_flight: deque[_Step] = deque()
        self._pace = Pace() if limits.plan_late else None
        # When the host turns without a result: at once, if a request came meanwhile.
        self._due = math.inf
        self._unstarted: set[int] = set()
        # Row -> position whose computation samples the last token of an output that ends early.
        self._ends: dict[int, int] = {}
        self._early: dict[int, int] = {}
        # Row -> its number of tokens, of rows whose last step had drafts or began behind some.
        self._lengths: dict[int, int] = {}
        # Drafts, and right ones, that are still owed to the averages.
        self._owed = [0.0, 0.0]
        self._last_publish = -math.inf

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""
        return self.scheduler.num_running + self.scheduler.num_waiting

    def submit(self, request: SimulatedRequest) -> bool:
        """Add a request, in order of arrival; ``False`` if it is refused."""
        journal = self._journal
        self._host = max(self._host, request.at) + self._cost.submit
        key = journal.add(request.at, request.prompt_len, request.output_len)
        try:
            self.scheduler.add(request.to_engine(key))
        except SlipstreamError:
            journal.refused += 1
            return False
        self._unstarted.add(key)
        if request.task == "generate" and request.output_len < request.max_tokens:
            self._early[key] = request.prompt_len + request.output_len - 1
        self._due = 0.0
        return True

    def advance(self, until: float) -> None:
        """Simulate everything that begins before ``until``."""
        while True:
            due = self._due if len(self._in_flight) < self._depth else math.inf
            if self._in_flight:
                due = min(due, self._in_flight[0].arrives)
            begin = max(self._host, due)
            if begin >= until:
                return
            self._turn(begin)

    def _turn(self, begin: float) -> None:
        self._due = math.inf
        cost, now = self._cost, begin
        events: list[RequestEvent] = []
        work = None
        while self._in_flight and self._in_flight[0].arrives <= begin:
            step = self._in_flight.popleft()
            work = step.work
            events += self.scheduler.commit(step.result)
            now += cost.commit.seconds(work)
            if self._pace is not None:
                self._pace.observe(step.plan, step.end - step.start)
        while len(self._in_flight) < self._depth and not self._plans_later(now):
            plan = self.scheduler.schedule()
            if plan is None:
                break
            now = self._launch(plan, now)
        self._host = now
        if work is not None:
            self._publish(events, work)

    def _plans_later(self, now: float) -> bool:
        if self._pace is None:
            return False
        running, start = None, 0.0
        if self._in_flight:
            running, start = self._in_flight[-1].plan, self._in_flight[-1].start
        delay = self._pace.decide(self.scheduler, running, start, now)
        if delay:
            self._due = now + delay
        return delay > 0

    def _launch(self, plan: StepPlan, now: float) -> float:
        """Put a plan into the device's queue; returns when the host has finished doing so."""
        result, work = self._execute(plan)
        cost = self._cost
        now += cost.plan.seconds(work)
        seconds = cost.device.seconds(work)
        if self._spread is not None:
            drawn = self._spread[int(self._random() * len(self._spread))]
            seconds = max(_QUICKEST * seconds, seconds + drawn * math.sqrt(seconds))
        start = max(now, self._device) + cost.dispatch
        self._device = start + seconds
        self.busy_seconds += seconds
        arrives = self._device + cost.handover.step
        self._in_flight.append(_Step(plan, result, work, start, self._device, arrives))
        return now

    def _execute(self, plan: StepPlan) -> tuple[StepResult, Work]:
        """The device's result for a plan, and the amount of work."""
        if self._early:
            for install in plan.installs:
                self._ends.pop(install.row, None)
                if (end := self._early.get(install.request_key)) is not None:
                    self._ends[install.row] = end
        ends = self._ends
        rows = []
        starts = prefill_rows = prefill_tokens = pairs = sampled = pooled = drafted = ended_rows = 0
        for step in plan.rows:
            if step.drafts or step.slack:
                result, known = self._verify(step, joins=bool(plan.installs))
                rows.append(result)
                if known < step.limit:
                    sampled += 1
                    starts += known - 1
                    drafted += result.drafted
                else:
                    ended_rows += 1
                continue
            count = step.num_tokens
            starts += step.start
            if count > 1 or not step.samples:
                prefill_rows += 1
                prefill_tokens += count
                pairs += (count - 1) * (2 * step.start + count) // 2
            if step.samples:
                sampled += 1
                ended = ends and ends.get(step.row) == step.start + count
                rows.append(RowResult(step.row, step.generation, _END if ended else _TOKEN))
            elif step.pools:
                pooled += 1
                rows.append(RowResult(step.row, step.generation, _NOTHING, vector=_VECTOR))
            else:
                rows.append(RowResult(step.row, step.generation, _NOTHING))
        decode_rows = len(rows) - prefill_rows - ended_rows
        context = starts + decode_rows + prefill_tokens
        work = Work(
            decode_rows, prefill_rows, prefill_tokens, context, pairs, sampled, pooled, drafted
        )
        return StepResult(plan.step_id, rows), work

    def _verify(self, step: RowStep, *, joins: bool) -> tuple[RowResult, int]:
        """The result of a row that may have drafts, and its number of tokens before.

        Where a row is with drafts in flight is known here, as it is on a device. Where a request
        ``joins`` the others, nobody drafts.
        """
        known = self._lengths.get(step.row, step.start + 1) if step.slack else step.start + 1
        if known >= step.limit:
            return RowResult(step.row, step.generation, _NOTHING), known
        most = min(step.drafts, step.limit - known - 1)
        drafted = accepted = 0
        if most > 0 and not joins:
            # Where rows have less room than the average there is nothing to make up for later.
            self._owed[0] = min(self._owed[0] + self._cost.drafted, _MOST_OWED)
            self._owed[1] = min(self._owed[1] + self._cost.accepted, _MOST_OWED)
            drafted = min(int(self._owed[0]), most)
            accepted = min(int(self._owed[1]), drafted)
            self._owed[0] -= drafted
            self._owed[1] -= accepted
        token_ids = _TOKEN * (1 + accepted)
        end = self._ends.get(step.row, -1)
        if known <= end <= known + accepted:
            accepted = end - known
            token_ids = _TOKEN * accepted + _END
        self._lengths[step.row] = known + len(token_ids)
        result = RowResult(step.row, step.generation, token_ids, drafted=drafted, accepted=accepted)
        return result, known

    def _publish(self, events: list[RequestEvent], work: Work) -> None:
        """Deliver tokens to the readers, one after the other."""
        journal, unstarted = self._journal, self._unstarted
        now = self._host
        seconds = self._cost.publish.seconds(work)
        each = seconds / max(1, len(events))
        for event in events:
            now += each
            if event.key in unstarted and event.token_ids:
                unstarted.discard(event.key)
                journal.first[event.key] = now
            elif event.finish_reason is None:
                continue
            if event.finish_reason is not None:
                journal.last[event.key] = now
                unstarted.discard(event.key)
                self._early.pop(event.key, None)
        # There is no gap before a first step.
        if work.decode_rows and self._last_publish > -math.inf:
            journal.gaps.append(self._host - self._last_publish)
            journal.gap_rows.append(work.decode_rows)
        self._last_publish = self._host
        # The part of the handover that grows with tokens is the readers' work on them.
        handover = self._cost.handover
        self._host += seconds + handover.sampled_rows * work.sampled_rows
        self._host += handover.pooled_rows * work.pooled_rows
