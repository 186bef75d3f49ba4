"""A scheduler on a fake device, driven one operation at a time and checked after each."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from src.core.outputs import FinishReason, RequestEvent
from src.core.plan import RowResult, StepPlan, StepResult
from src.core.request import Request
from src.core.sampling_params import SamplingParams
from src.engine.scheduling.admission import URGENT
from src.engine.scheduling.request_state import Phase
from src.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from tests.engine.scheduling.fake_worker import (
    END_TOKEN,
    FakeWorker,
    expected_output,
    prompt_logprob,
)


def make_request(
    key: int,
    prompt: list[int] | int,
    max_tokens: int = 4,
    *,
    ends: bool = True,
    min_tokens: int = 0,
    prompt_logprobs: int | None = None,
    seed: int = 0,
    priority: int = 0,
    deadline: float | None = None,
    cache_salt: str = "",
    tenant: str = "",
    media_keys: Mapping[int, bytes] | None = None,
    stop: list[str] | None = None,
    call: int | None = None,
) -> Request:
    """``prompt`` as a number is that many tokens nobody else has; ``ends``: may stop by itself."""
    if isinstance(prompt, int):
        prompt = [1000 * (key + 1) + i for i in range(prompt)]
    return Request(
        key=key,
        prompt_token_ids=prompt,
        params=SamplingParams(
            min_tokens=min_tokens, prompt_logprobs=prompt_logprobs, stop=tuple(stop or ())
        ),
        max_tokens=max_tokens,
        seed=seed,
        end_token_ids=frozenset({END_TOKEN}) if ends else frozenset(),
        priority=priority,
        deadline=deadline,
        cache_salt=cache_salt,
        tenant=tenant,
        media_keys=media_keys or {},
        call=call,
    )


def make_limits(**changes: object) -> SchedulerLimits:
    settings: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "block_size": 2,
        "num_blocks": 12,
        "max_model_len": 64,
    }
    return SchedulerLimits(**(settings | changes))  # type: ignore[arg-type]


class Simulation:
    def __init__(
        self, limits: SchedulerLimits, depth: int = 1, scheduler: Scheduler | None = None
    ) -> None:
        limits = msgspec.structs.replace(limits, max_in_flight=depth)
        self.limits = limits
        self.depth = depth
        self.scheduler = scheduler or Scheduler(limits)
        self.worker = FakeWorker(limits)
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.first_events: dict[int, RequestEvent] = {}
        self.overtaken: dict[int, int] = {}
        self.plans: list[StepPlan] = []

    def add(self, request: Request) -> None:
        self.worker.requests[request.key] = request
        self.scheduler.add(request)
        self.outputs[request.key] = []

    def launch(self) -> StepPlan | None:
        """Plan and launch one step, unless the pipeline is full."""
        if len(self.worker.in_flight) >= self.depth:
            return None
        scheduler = self.scheduler
        states = sorted(scheduler._requests.values(), key=lambda state: state.rank)
        waiting = [state for state in states if state.phase is Phase.WAITING]
        decodes = {
            state.row
            for state in states
            if state.phase is Phase.RUNNING
            and state.target - state.launched == 1
            and not state.is_exhausted
        }
        # One token of a prompt may be left too; who waits for that has waited anyway.
        prompts = {state.row for state in states if state.launched < state.prompt_len}
        before = self.scarcity()
        running = [state for state in states if state.phase is Phase.RUNNING]
        plan = scheduler.schedule()
        scheduler.check()
        if running:
            heads = {state.lane: state for state in reversed(running)}
            oldest = min(state.rank[1] for state in heads.values())
            first = heads.get(URGENT) or next(s for s in heads.values() if s.rank[1] == oldest)
            assert first.phase is Phase.RUNNING, "the first in line was preempted"
        if plan is None:
            assert self.worker.in_flight or not scheduler.has_work, "nothing planned: deadlock"
            return None
        waits = self.waits_for_prefix()
        # Who has no place yet is behind others of its flow.
        waiting.sort(key=lambda state: (state.place is None, state.place or state.rank))
        lanes: dict[str, list[int]] = {}
        for state in waiting:
            if state.key not in waits:
                lanes.setdefault(state.lane, []).append(state.key)
        for install in plan.installs:
            state = scheduler._requests[install.request_key]
            # Who has just been preempted can be back at once.
            line = lanes.setdefault(state.lane, [])
            if state.key not in line:
                continue
            if state.key != line[0]:
                head = line[0]
                self.overtaken[head] = self.overtaken.get(head, 0) + 1
                assert self.overtaken[head] <= self.limits.max_bypasses, "starved"
            line.remove(state.key)
        if before == self.scarcity():
            planned = {step.row for step in plan.rows}
            # Who gave way to another tenant's request runs no more.
            runs = {state.row for state in running if state.phase is Phase.RUNNING}
            assert decodes & runs <= planned, "a decode row was left out"
        else:
            assert not plan.installs, "somebody was admitted while a running row is short"
        decoding = sum(step.row in decodes - prompts for step in plan.rows)
        if decoding and self.limits.max_mixed_prefill_tokens is not None:
            prompts_of = [step for step in plan.rows if step.row not in decodes]
            prefill = sum(step.num_tokens - step.drafts for step in prompts_of)
            per_row = self.limits.prefill_tokens_per_decode * decoding
            most = max(self.limits.max_mixed_prefill_tokens, per_row)
            assert prefill <= most, "decoding rows wait for more of prompts than they should"
        self.worker.launch(plan)
        self.plans.append(plan)
        return plan

    def scarcity(self) -> tuple[int, int]:
        """How often a row waited for memory, and how often one was preempted for a running one."""
        stats = self.scheduler.stats
        return stats.shortages, stats.preemptions - stats.yields

    def waits_for_prefix(self) -> set[int]:
        """Keys of those who wait for a prefix, and whom others may go past meanwhile."""
        allocator = self.scheduler._allocator
        return {
            state.key
            for state in self.scheduler._requests.values()
            if state.phase is Phase.WAITING
            and state.bypasses < self.limits.max_bypasses
            and allocator.waits_for_prefix(
                state, allocator.cached_prefix(state), self.limits.max_num_batched_tokens
            )
        }

    def commit(self) -> list[RequestEvent]:
        """Commit the oldest launched step, if there is one."""
        if not self.worker.in_flight:
            return []
        events = self.scheduler.commit(self.worker.next_result())
        self.scheduler.check()
        for event in events:
            self._record(event)
        return events

    def finish(self, key: int, reason: FinishReason = FinishReason.ABORT) -> RequestEvent | None:
        event = self.scheduler.finish(key, reason)
        self.scheduler.check()
        assert (event is None) == (key in self.finished or key not in self.outputs)
        if event is not None:
            self._record(event)
        return event

    def expire(self, now: float) -> list[RequestEvent]:
        events = self.scheduler.expire(now)
        self.scheduler.check()
        for event in events:
            deadline = self.worker.requests[event.key].deadline
            assert deadline is not None
            assert deadline <= now
            self._record(event)
        for state in self.scheduler._requests.values():
            assert state.request.deadline is None or state.request.deadline > now
        return events

    def fail_step(self) -> None:
        """The oldest launched step fails, if there is one, and its requests with it."""
        if self.worker.in_flight:
            self.worker.fail_next()
            # The worker leaves out rows that have nothing left to compute; the result has them.
            plan = self.scheduler._in_flight[0][0]
            for key in self.scheduler.keys_of(plan):
                self.finish(key, FinishReason.ERROR)
            rows = [RowResult(step.row, step.generation, []) for step in plan.rows]
            assert self.scheduler.commit(StepResult(plan.step_id, rows)) == []
            self.scheduler.check()

    def step(self) -> None:
        """One turn of the loop: fill the pipeline, commit one step."""
        while self.launch() is not None:
            pass
        self.commit()

    def drain(self) -> None:
        """Run until nothing is left to do; everything must end, and the books must balance."""
        work = sum(
            len(self.worker.requests[key].prompt_token_ids) + self.worker.requests[key].max_tokens
            for key in self.outputs
        )
        for _ in range(100 + 20 * work):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "not everything ended"
        self.scheduler.check_idle()
        assert self.scheduler.kv_usage == 0.0
        assert self.scheduler.waiting_tokens == self.scheduler.num_waiting == 0
        assert self.scheduler.num_running == 0
        assert self.finished.keys() == self.outputs.keys()

    def _record(self, event: RequestEvent) -> None:
        request = self.worker.requests[event.key]
        assert event.key not in self.finished, "an event after the last one"
        output = self.outputs[event.key]
        output.extend(event.token_ids)
        expected, reason = expected_output(request)
        assert output == expected[: len(output)], "a token lost, duplicated or wrong"
        if event.key in self.first_events:
            assert event.prompt_logprobs is None
            assert event.cached_tokens == 0
        else:
            self.first_events[event.key] = event
            if request.params.prompt_logprobs is not None and event.token_ids:
                positions = range(1, len(request.prompt_token_ids))
                assert event.prompt_logprobs == [prompt_logprob(request, p) for p in positions]
                assert event.cached_tokens == 0
            else:
                assert event.prompt_logprobs is None
        if event.finish_reason is None:
            assert event.token_ids
            assert event.stop_token_id is None
            return
        self.finished[event.key] = event.finish_reason
        if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and event.token_ids:
            assert output == expected
            assert event.finish_reason is reason
            stopped = event.finish_reason is FinishReason.STOP
            assert event.stop_token_id == (END_TOKEN if stopped else None)
