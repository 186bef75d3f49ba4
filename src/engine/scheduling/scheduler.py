"""The scheduler: decides what the device computes next. No device, no clock, no randomness.

Same calls, same plans. ``docs/scheduling.md`` has the rules and why none of them can starve or
deadlock; ``docs/kv-memory.md`` has blocks and the prefix cache.

One step is planned in this order, under one token budget:

1. running rows with one token left to compute (decode), by rank;
2. running rows with more than one (prefill chunks), by rank;
3. admissions, by rank, unless a running row is short of memory;
4. drafts for rows that decode, with what is left.

In a step with decoding rows prefill may not use the whole remaining budget, because the decoding
rows would wait for it.

A request is admitted only when every running row got a token and budget is left. So there are never
more running rows than tokens in the budget, and no decoding row waits for budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from src.core.outputs import FinishReason, RequestEvent
from src.core.plan import RowResult, RowStep, StepPlan, StepResult
from src.core.request import Request
from src.engine.kv.block_pool import BlockPool, InvariantError
from src.engine.scheduling import stop_rules as stop
from src.engine.scheduling.admission import URGENT, SchedulerLimits, check_request
from src.engine.scheduling.content_names import ContentNames
from src.engine.scheduling.plan_builder import PlanBuilder, SchedulerStats
from src.engine.scheduling.planning import StepPlanner
from src.engine.scheduling.request_state import MOST_TOLD, Phase, RequestState
from src.engine.scheduling.row_allocator import RowAllocator
from src.engine.scheduling.shares import SharingPlanner
from src.engine.scheduling.waiting import Deadlines, Reservation, WaitingQueue

__all__ = ["InvariantError", "Scheduler", "SchedulerLimits", "SchedulerStats"]


class Scheduler:
    """Requests in, plans out; results in, events out.

    The caller launches every plan it gets, in order, and commits their results in that order. Any
    number of steps may be in flight; the loop keeps at most ``pipeline_depth``.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.stats = SchedulerStats()
        self._allocator = RowAllocator(limits)
        self._names = ContentNames(limits)
        self._waiting = WaitingQueue(
            limits.max_waiting_requests,
            limits.max_waiting_tokens,
            self._allocator.adapters,
            limits.weights,
        )
        self._lanes = self._waiting.lanes
        parts = (limits, self._allocator, self._waiting, self.stats)
        self._planner = StepPlanner(*parts, self._preempt)
        self._sharing = SharingPlanner(self._planner, *parts)
        self._deadlines = Deadlines()
        self._num_arrived = 0
        # Unfinished requests, key -> state.
        self._requests: dict[int, RequestState] = {}
        self._in_flight: deque[tuple[StepPlan, list[RequestState]]] = deque()
        self._last_launched = 0
        self._last_committed = 0
        # Keys of preempted requests, oldest first, until `take_preempted` returns them.
        self._preempted: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether there is a request to serve or a launched step to commit."""
        return bool(self._requests or self._in_flight)

    @property
    def has_free_row(self) -> bool:
        """Whether a row is free, so that a request need not wait for another's end."""
        return self._allocator.rows.num_free > 0

    @property
    def states(self) -> Collection[RequestState]:
        """States of all unfinished requests, for reading only."""
        return self._requests.values()

    @property
    def num_running(self) -> int:
        """Unfinished requests that hold a row."""
        return len(self._requests) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue, preempted ones included."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of all waiting requests: their prompts, and the output of preempted ones."""
        return self._waiting.num_tokens

    def tenants(self, most: int) -> dict[str, tuple[int, int]]:
        """Running and waiting requests of up to ``most`` tenants; any thread may ask.

        Urgent ones are not among them: they are in a lane of their own.
        """
        counted: dict[str, tuple[int, int]] = {}
        for lane in list(self._waiting.lanes.values()):
            if lane.name and lane.name != URGENT and len(counted) < most:
                waiting = lane.num_waiting
                counted[lane.name] = lane.num_unfinished - waiting, waiting
        return counted

    @property
    def kv_usage(self) -> float:
        """Held blocks over all blocks, 0 to 1; cached blocks count as free."""
        return self._allocator.pool.num_held / self.limits.num_blocks

    @property
    def block_counts(self) -> tuple[int, int, int]:
        """Number of held, cached and free blocks. The sum is all blocks."""
        pool = self._allocator.pool
        return pool.num_held, pool.num_cached, pool.num_free - pool.num_cached

    @property
    def admits(self) -> bool:
        """Whether the waiting queue has room for one more request of one token."""
        waiting, limits = self._waiting, self.limits
        if len(waiting) >= limits.max_waiting_requests:
            return False
        tokens = waiting.num_tokens + waiting.num_reserved
        return not tokens or tokens < limits.max_waiting_tokens

    @property
    def pool(self) -> BlockPool:
        """The block pool, for reading only."""
        return self._allocator.pool

    def state(self, key: int) -> RequestState | None:
        """The state of an unfinished request, for reading only; ``None`` if there is none."""
        return self._requests.get(key)

    def keys_of(self, plan: StepPlan) -> list[int]:
        """Keys of the unfinished requests in a plan that is in flight, in the plan's order.

        Raises
        ------
        ValueError
            If the plan is not in flight.
        """
        return [state.key for state in self._states_of(plan) if state.phase is not Phase.ENDED]

    def key_at(self, plan: StepPlan, index: int) -> int | None:
        """Key of the request of one row of a plan that is in flight; ``None`` if it has ended.

        Raises
        ------
        ValueError
            If the plan is not in flight.
        """
        state = self._states_of(plan)[index]
        return None if state.phase is Phase.ENDED else state.key

    def _states_of(self, plan: StepPlan) -> Sequence[RequestState]:
        for launched, states in self._in_flight:
            if launched.step_id == plan.step_id:
                return states
        raise ValueError(f"step {plan.step_id} is not in flight")

    # Requests come in, and end from outside.

    def take_preempted(self) -> list[int]:
        """Keys of the requests preempted since the last call, in that order."""
        taken, self._preempted = self._preempted, []
        return taken

    def check_room(self, requests: Sequence[Request]) -> None:
        """Refuse the completions of one request unless `add_all` would take them now.

        Raises
        ------
        PromptTooLongError, InvalidRequestError
            If one of them can never run, or all of them never fit the waiting queue together.
        QueueFullError
            If they do not fit now.
        """
        for request in requests:
            check_request(request, self.limits)
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        if any(request.prediction for request in requests):
            # Requests may share a prediction.
            predicted = {id(request.prediction): request.num_predicted for request in requests}
            num_tokens += sum(predicted.values())
        lane = self.limits.lane_of(requests[0])
        self._waiting.check_room(num_tokens, len(requests), lane)
        if requests[0].is_further:
            self._waiting.check_further(lane)

    def check_queue(self, num_requests: int, num_tokens: int, tenant: str = "") -> None:
        """Refuse completions of ``num_tokens`` tokens together, unless the queue has room.

        Those are of their prompts and predictions. ``tenant``: whose they are.

        Raises
        ------
        InvalidRequestError
            If the queue can never hold all of them together.
        QueueFullError
            If they do not fit now.
        """
        self._waiting.check_room(num_tokens, num_requests, tenant)

    def reservation(self, tenant: str = "") -> Reservation:
        """Where a call counts the tokens of texts that it queues later."""
        return Reservation(self._waiting, tenant)

    def add(self, request: Request, *, succeeds: bool = False) -> None:
        """Put a request of one completion into the waiting queue; see `add_all`."""
        self.add_all((request,), succeeds=succeeds)

    def add_all(self, requests: Sequence[Request], *, succeeds: bool = False) -> None:
        """Put the completions of one request into the waiting queue, all or none.

        Those with the prompt list object, cache salt, adapter and media of the first share the
        prompt's block hashes with it.

        Parameters
        ----------
        succeeds
            Whether they take the place of a request of the same caller that has just ended, and
            that had no other. They are taken though the queue is full: with one place for each
            caller it grows by no more than the callers.

        Raises
        ------
        PromptTooLongError, InvalidRequestError
            If one of them can never run, or all of them never fit the waiting queue together.
        QueueFullError
            If they do not fit now.
        ValueError
            If a key is in use.
        """
        for request in requests:
            if request.key in self._requests:
                raise ValueError(f"request key {request.key} is in use")
        if succeeds:
            for request in requests:
                check_request(request, self.limits)
        else:
            self.check_room(requests)
        for request in requests:
            self._enter(request, requests[0].key)

    def _enter(self, request: Request, first: int) -> None:
        prompt = request.prompt_token_ids
        lane = self.limits.lane_of(request)
        self._num_arrived += 1
        priority = request.priority if self.limits.policy == "priority" else 0
        state = RequestState(
            request=request,
            key=request.key,
            rank=(priority, self._num_arrived),
            chain=self._names.chain_of(request, self._requests.get(first)),
            token_ids=list(prompt),
            prompt_len=len(prompt),
            limit=len(prompt) + request.max_tokens,
            lane=lane,
            prompt_logprobs=None if request.params.prompt_logprobs is None else [],
        )
        self._requests[request.key] = state
        self._waiting.enter(state)
        self._deadlines.push(state)

    def finish(self, key: int, reason: FinishReason) -> RequestEvent | None:
        """End a request from outside and return its last event; ``None`` if it has ended before.

        Tokens that launched steps still sample for it are dropped.
        """
        state = self._requests.get(key)
        if state is None:
            return None
        self._end(state)
        self._deadlines.discard(state)
        return state.event(finish_reason=reason)

    def expire(self, now: float) -> list[RequestEvent]:
        """End the requests whose deadline is at or before ``now`` (``time.monotonic`` seconds)."""
        events = []
        while (state := self._deadlines.pop_expired(now)) is not None:
            self._end(state)
            events.append(state.event(finish_reason=FinishReason.DEADLINE))
        return events

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Blocks of requests that run now will not be cached either."""
        self._allocator.reset_cache()

    # Planning.

    def schedule(self) -> StepPlan | None:
        """Plan the next step, which must be launched at once; ``None`` if there is none to launch.

        With no step in flight it is ``None`` only if there is no request.
        """
        self._planner.begin()
        most, snapshots = self.limits.max_num_batched_tokens, self._allocator.snapshots
        builder = PlanBuilder(self._last_launched + 1, most, snapshots)
        prefills: list[RequestState] = []
        decoding = 0
        # With one tenant at work, rank decides everything.
        is_shared = len(self._lanes) > 1
        if is_shared:
            self._sharing.make_room()
        # Iterates over a copy, because a preempted request leaves the list.
        for state in self._allocator.running[:]:
            if state.phase is not Phase.RUNNING or state.is_exhausted:
                continue
            if state.target - state.launched > 1:
                prefills.append(state)
            # Behind drafts in flight a row may already be as long as it can get.
            elif min(state.launched, state.limit - 2) < state.capacity or self._planner.grow(
                state, builder
            ):
                decoding += state.launched >= state.prompt_len
                builder.add(state, 1)
        if decoding and self.limits.max_mixed_prefill_tokens is not None:
            # The limit grows with the decoding rows: with many of them a fixed one would be a small
            # part of each step, and prompts would wait too long.
            per_row = self.limits.prefill_tokens_per_decode * decoding
            builder.leave(max(self.limits.max_mixed_prefill_tokens, per_row))
        if decoding and self.limits.max_mixed_pooled_tokens is not None:
            builder.leave_pooled(max(self.limits.max_mixed_pooled_tokens, decoding // 4))
        for lane in self._waiting.lanes.values():
            lane.bring_back(builder.pooled_budget)
        if is_shared:
            self._sharing.fill(builder, prefills)
        elif prefills or len(self._waiting):
            self._planner.fill(builder, prefills)
        if is_shared and self.limits.whole_prompts and not (builder.rows or self._in_flight):
            # The first prompts are longer than the shares of their tenants.
            self._planner.fill(builder, prefills)
        if not builder.rows:
            return None
        if self.limits.drafts:
            self._planner.draft(builder)
        plan = builder.plan()
        self._in_flight.append((plan, builder.states))
        self._last_launched = builder.step_id
        self.stats.steps += 1
        self.stats.scheduled_tokens += builder.num_tokens
        return plan

    def _preempt(self, victim: RequestState) -> None:
        """Take a running request's row; it waits again behind its fence."""
        self.stats.preemptions += 1
        self.stats.recomputed_tokens += victim.certain
        self._preempted.append(victim.key)
        self._leave(victim, Phase.PREEMPTING)

    # Results.

    def commit(self, result: StepResult) -> list[RequestEvent]:
        """Commit the result of the oldest step in flight, and return the requests' events.

        Raises
        ------
        InvariantError
            If it is not the oldest step's, or its rows are not the plan's.
        """
        if not self._in_flight or self._in_flight[0][0].step_id != result.step_id:
            oldest = self._in_flight[0][0].step_id if self._in_flight else None
            raise InvariantError(f"step {result.step_id} is committed, the oldest is {oldest}")
        plan, states = self._in_flight.popleft()
        if len(result.rows) != len(plan.rows):
            raise InvariantError(
                f"step {plan.step_id} has {len(plan.rows)} rows, its result {len(result.rows)}"
            )
        self._last_committed = plan.step_id
        saves = {save.row: save.slot for save in plan.state_saves}
        events = []
        for planned, state, row in zip(plan.rows, states, result.rows, strict=True):
            if row.row != planned.row or not (
                row.generation == planned.generation == state.generation
            ):
                raise InvariantError(
                    f"step {plan.step_id}: row {planned.row} generation {planned.generation} was "
                    f"planned, row {row.row} generation {row.generation} came back, the request "
                    f"is at {state.generation}"
                )
            was_leaving, had_ended = state.phase is not Phase.RUNNING, state.phase is Phase.ENDED
            if had_ended:
                self.stats.discarded_tokens += len(row.token_ids)
            elif (event := self._commit_row(state, planned, row)) is not None:
                events.append(event)
            if (slot := saves.get(planned.row)) is not None:
                self._allocator.settle(state, planned, slot, is_valid=not had_ended)
            if was_leaving and state.last_step == plan.step_id:
                self._pass_fence(state)
        return events

    def _commit_row(
        self, state: RequestState, planned: RowStep, row: RowResult
    ) -> RequestEvent | None:
        num_tokens = len(row.token_ids)
        if not planned.samples <= num_tokens <= planned.num_sampled:
            raise InvariantError(
                f"row {planned.row}: {num_tokens} tokens came back, "
                f"{int(planned.samples)} to {planned.num_sampled} expected"
            )
        if state.prompt_logprobs is not None and row.prompt_logprobs is not None:
            state.collect_prompt_logprobs(planned.start, row.prompt_logprobs)
        reason = None
        if num_tokens > 1:
            kept, reason = self._accept(state, row.token_ids)
            if kept < num_tokens:
                self.stats.discarded_tokens += num_tokens - kept
                row = row.first(kept)
                num_tokens = kept
            # The last token's KV is not computed yet.
            state.token_ids += row.token_ids[:-1]
            state.committed += num_tokens
        else:
            # It may begin later than planned, but then it is one token.
            state.committed += planned.num_tokens - planned.drafts
        if state.committed >= (state.registered + 1) * self.limits.block_size:
            self._allocator.take_in(state)
        if planned.pools:
            self._end(state)
            self._deadlines.discard(state)
            return state.event(row, FinishReason.STOP)
        if not planned.samples:
            return None
        token_id = row.token_ids[-1]
        state.token_ids.append(token_id)
        state.settle()
        if row.rests or state.rests > MOST_TOLD:
            # Steps in flight are planned already.
            state.rests = max(0, row.rests - len(state.ahead))
        if num_tokens == 1:
            num_output = len(state.token_ids) - state.prompt_len
            reason = stop.finish_reason(state.request, token_id, num_output)
        if reason is not None:
            self._end(state)
            self._deadlines.discard(state)
        return state.event(row, reason)

    @staticmethod
    def _accept(state: RequestState, token_ids: list[int]) -> tuple[int, FinishReason | None]:
        """How many of a step's tokens the output keeps, and why it ends with the last, if so."""
        num_output = len(state.token_ids) - state.prompt_len
        for kept, token_id in enumerate(token_ids, 1):
            reason = stop.finish_reason(state.request, token_id, num_output + kept)
            if reason is not None:
                return kept, reason
        return len(token_ids), None

    # Leaving: the request is marked at once; its row and blocks come back behind the fence.

    def _end(self, state: RequestState) -> None:
        """End a request in whatever phase it is."""
        del self._requests[state.key]
        if state.phase is Phase.RUNNING:
            self._leave(state, Phase.ENDED)
        else:
            was_waiting = state.phase is Phase.WAITING
            state.phase = Phase.ENDED
            if was_waiting:
                self._waiting.discard(state)
        self._waiting.leave(state)

    def _leave(self, state: RequestState, phase: Phase) -> None:
        self._allocator.leave(state, phase)
        if state.last_step <= self._last_committed:
            self._pass_fence(state)

    def _pass_fence(self, state: RequestState) -> None:
        """Take back row and blocks of a leaving request: no step in flight names it any more."""
        self._allocator.release(state)
        if state.phase is Phase.PREEMPTING:
            state.phase = Phase.WAITING
            self._waiting.push(state)

    # Checks of invariants.

    def check(self) -> None:
        """Check that every block, row and request is accounted for; O(blocks and requests).

        For tests: it is too slow for a scheduler at work.

        Raises
        ------
        InvariantError
            Something is lost, or counted twice.
        """
        allocator = self._allocator
        allocator.check([save for plan, _ in self._in_flight for save in plan.state_saves])
        self._waiting.check()
        unfinished = sum(lane.num_unfinished for lane in self._waiting.lanes.values())
        preempting = sum(state.phase is Phase.PREEMPTING for state in allocator.leaving)
        expected = len(self._waiting) + len(allocator.running) + preempting
        if not len(self._requests) == expected == unfinished:
            raise InvariantError(
                f"{len(self._requests)} requests, {expected} accounted for, {unfinished} in lanes"
            )

    def check_idle(self) -> None:
        """Check by counters that an idle scheduler holds nothing; O(1).

        Raises
        ------
        InvariantError
            If it has work, or a block or a row was lost.
        """
        if self.has_work or self._allocator.leaving:
            raise InvariantError(
                f"not idle: {len(self._requests)} requests, "
                f"{len(self._allocator.leaving)} leaving, {len(self._in_flight)} steps in flight"
            )
        if len(self._waiting):
            raise InvariantError(f"not idle: {len(self._waiting)} requests in the queue")
        self._allocator.check_idle()

    def pool_is_whole(self) -> bool:
        """Whether free + cached + held == total, and no block is held without a request; O(1)."""
        allocator = self._allocator
        nobody = not allocator.running and not allocator.leaving
        return allocator.pool.is_whole and not (nobody and allocator.pool.num_held)
