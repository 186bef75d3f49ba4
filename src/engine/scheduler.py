"""What the device computes next, decided with integers: no device, no clock, no randomness.

Same calls, same plans. ``docs/scheduling.md`` has the rules and why none of them can starve or
deadlock; ``docs/kv-memory.md`` has blocks and the prefix cache.

One step is planned in this order, under one token budget:

1. running rows with one token left to compute (decode), by rank; if there are more of them than
   budget, those that waited longest go first;
2. running rows with more than one (prefill chunks), by rank;
3. admissions, by rank, unless a running row is short of memory.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter

import msgspec

from src.core.outputs import FinishReason, RequestEvent
from src.core.plan import BlockAppend, RowInstall, RowResult, RowStep, StepPlan, StepResult
from src.core.request import Request
from src.engine import stop
from src.engine.admission import (
    MAX_MISFITS_PER_STEP,
    Deadlines,
    SchedulerLimits,
    WaitingQueue,
    check_request,
)
from src.engine.blocks import InvariantError, blocks_for
from src.engine.lifecycle import Phase, RequestState
from src.engine.prefix import HashChain, PrefixCache
from src.engine.rows import RowTable

__all__ = ["InvariantError", "Scheduler", "SchedulerLimits", "SchedulerStats"]

_by_rank = attrgetter("rank")
_by_last_step = attrgetter("last_step")


class SchedulerStats(msgspec.Struct):
    """Counters since the start; they only grow.

    Attributes
    ----------
    steps, scheduled_tokens
        Plans handed out and the tokens in them.
    admissions, preemptions
        Rows given to requests (a resumed request counts again), and taken from them.
    recomputed_tokens
        Positions whose KV was given up by preemption.
    prefix_cache_queries, prefix_cache_hits
        Tokens looked up and found in the prefix cache, at admissions that may read it.
    bypasses
        Admissions that overtook a first-in-line request that did not fit.
    shortages
        Row-steps put off because no block was free.
    discarded_tokens
        Tokens sampled for requests that had ended meanwhile: what the pipeline's depth costs.
    """

    steps: int = 0
    scheduled_tokens: int = 0
    admissions: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    bypasses: int = 0
    shortages: int = 0
    discarded_tokens: int = 0


class _Draft:
    """A plan being written."""

    __slots__ = ("appends", "budget", "installs", "rows", "short", "states", "step_id")

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.installs: list[RowInstall] = []
        self.appends: list[BlockAppend] = []
        self.rows: list[RowStep] = []
        self.states: list[RequestState] = []
        # Whether a running row had to wait for memory.
        self.short = False

    def add(self, state: RequestState, num_tokens: int) -> None:
        self.rows.append(state.launch(self.step_id, num_tokens))
        self.states.append(state)
        self.budget -= num_tokens


class Scheduler:
    """Requests in, plans out; results in, events out.

    The caller launches every plan it gets, in order, and commits their results in that order. Any
    number of steps may be in flight; the loop keeps at most ``pipeline_depth``.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.stats = SchedulerStats()
        self._cache = PrefixCache(
            limits.num_blocks, limits.block_size, enabled=limits.enable_prefix_caching
        )
        self._pool = self._cache.pool
        self._rows = RowTable(limits.max_num_seqs)
        self._waiting = WaitingQueue(limits.max_waiting_requests, limits.max_waiting_tokens)
        self._deadlines = Deadlines()
        self._num_arrived = 0
        # Unfinished requests, key -> state.
        self._requests: dict[int, RequestState] = {}
        # Phase RUNNING, sorted by rank.
        self._running: list[RequestState] = []
        # Ended or being preempted, with a launched step that still names the row.
        self._leaving: list[RequestState] = []
        # The highest-ranked running request that found no block; nobody behind it takes one.
        self._needy: RequestState | None = None
        self._in_flight: deque[tuple[StepPlan, list[RequestState]]] = deque()
        self._last_launched = 0
        self._last_committed = 0
        # Steps up to this one were forgotten by fail_all; their results are dropped.
        self._last_forgotten = 0

    # What the engine asks about the scheduler.

    @property
    def has_work(self) -> bool:
        """Whether there is a request to serve or a launched step to commit."""
        return bool(self._requests or self._in_flight)

    @property
    def num_running(self) -> int:
        """Unfinished requests that hold a row."""
        return len(self._requests) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row, preempted ones too."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of the waiting requests."""
        return self._waiting.num_tokens

    @property
    def kv_usage(self) -> float:
        """Held blocks over all blocks, 0 to 1; cached blocks count as free."""
        return self._pool.num_held / self._pool.num_blocks

    # What happens to requests from outside.

    def add(self, request: Request) -> None:
        """Put a request into the waiting queue.

        Raises
        ------
        PromptTooLongError, InvalidRequestError
            If it can never run.
        QueueFullError
            If the queue holds as many requests or tokens as it may.
        ValueError
            If the key is in use.
        """
        if request.key in self._requests:
            raise ValueError(f"request key {request.key} is in use")
        check_request(request, self.limits)
        prompt = request.prompt_token_ids
        self._waiting.check_room(len(prompt))
        self._num_arrived += 1
        priority = request.priority if self.limits.policy == "priority" else 0
        state = RequestState(
            request=request,
            rank=(priority, self._num_arrived),
            chain=HashChain(self.limits.block_size, request.cache_salt),
            token_ids=list(prompt),
            limit=len(prompt) + request.max_tokens,
            prompt_logprobs=None if request.params.prompt_logprobs is None else [],
        )
        self._requests[request.key] = state
        self._waiting.push(state)
        self._deadlines.push(state)

    def finish(self, key: int, reason: FinishReason) -> RequestEvent | None:
        """End a request from outside; ``None`` if it is unknown or has ended.

        Tokens that launched steps still sample for it are dropped.
        """
        state = self._requests.get(key)
        if state is None:
            return None
        self._end(state)
        self._deadlines.discard(state)
        return self._event(state, finish_reason=reason)

    def expire(self, now: float) -> list[RequestEvent]:
        """End the requests whose deadline is at or before ``now``, on the requests' clock."""
        events = []
        while (state := self._deadlines.pop_expired(now)) is not None:
            self._end(state)
            events.append(self._event(state, finish_reason=FinishReason.DEADLINE))
        return events

    def fail_all(self, reason: FinishReason = FinishReason.ERROR) -> list[RequestEvent]:
        """End every request, and forget the steps in flight and the prefix cache.

        For when the device failed: call it only when no launched step can still run. Results of
        forgotten steps may be committed and are dropped.
        """
        self._last_forgotten = self._last_committed = self._last_launched
        self._in_flight.clear()
        for state in self._leaving[:]:
            self._leave_fence(state)
        events = [
            event for key in list(self._requests) if (event := self.finish(key, reason)) is not None
        ]
        self.reset_prefix_cache()
        return events

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; nothing that running requests compute is cached either."""
        self._cache.reset()

    # Planning.

    def schedule(self) -> StepPlan | None:
        """The next step, to be launched at once; ``None`` if nothing can be launched now.

        With no step in flight it is ``None`` only if there is no request.
        """
        draft = _Draft(self._last_launched + 1, self.limits.max_num_batched_tokens)
        decodes: list[RequestState] = []
        prefills: list[RequestState] = []
        for state in self._running:
            pending = state.target - state.launched
            if state.target >= state.limit:
                continue  # its last token is being sampled
            (decodes if pending == 1 else prefills).append(state)
        if len(decodes) > draft.budget:
            decodes.sort(key=_by_last_step)
        for state in decodes:
            if draft.budget == 0:
                break
            if state.phase is Phase.RUNNING and (
                state.launched < state.capacity or self._grow(state, draft)
            ):
                draft.add(state, 1)
        for state in prefills:
            if draft.budget == 0:
                break
            if state.phase is Phase.RUNNING:
                draft.add(state, min(state.target - state.launched, draft.budget))
        if not draft.short and self._needy is None:
            self._admit(draft)
        return self._launch(draft) if draft.rows else None

    def _launch(self, draft: _Draft) -> StepPlan:
        plan = StepPlan(draft.step_id, draft.installs, draft.appends, draft.rows)
        self._in_flight.append((plan, draft.states))
        self._last_launched = draft.step_id
        self.stats.steps += 1
        self.stats.scheduled_tokens += self.limits.max_num_batched_tokens - draft.budget
        return plan

    def _grow(self, state: RequestState, draft: _Draft) -> bool:
        """Give a running row its next block; false if it has to wait for one."""
        needy = self._needy
        if needy is not None and needy.rank < state.rank:
            self._put_off(draft)
            return False
        while self._pool.num_free == 0:
            victim = None if self._blocks_are_coming() else self._victim(state, draft.step_id)
            if victim is None:
                self._needy = state
                self._put_off(draft)
                return False
            draft.short = True
            self._preempt(victim)
        if needy is state:
            self._needy = None
        blocks = self._pool.allocate(1)
        draft.appends.append(BlockAppend(state.row, len(state.block_ids), blocks))
        state.block_ids.extend(blocks)
        state.capacity += self.limits.block_size
        return True

    def _put_off(self, draft: _Draft) -> None:
        draft.short = True
        self.stats.shortages += 1

    def _blocks_are_coming(self) -> bool:
        """Whether a commit of launched steps will free a block for certain."""
        ending = [state for state in self._running if state.target >= state.limit]
        return self._pool.frees_some([state.block_ids for state in (*self._leaving, *ending)])

    def _victim(self, needy: RequestState, step_id: int) -> RequestState | None:
        """Whom to preempt for ``needy``: somebody behind it, not in the step that is being planned.

        The least important class first, in it the least to recompute, then the latest; among those
        that hold a block of their own, if there are such.
        """
        behind = [
            state
            for state in self._running
            if state.rank > needy.rank and state.last_step < step_id and state.target < state.limit
        ]
        owners = [state for state in behind if self._pool.frees_some([state.block_ids])]
        return min(
            owners or behind,
            key=lambda state: (-state.rank[0], state.launched, -state.rank[1]),
            default=None,
        )

    def _preempt(self, state: RequestState) -> None:
        self.stats.preemptions += 1
        self.stats.recomputed_tokens += state.launched
        self._leave_running(state, Phase.PREEMPTING)

    def _admit(self, draft: _Draft) -> None:
        """Give rows to waiting requests, first in line first."""
        if draft.budget == 0 or self._rows.num_free == 0 or len(self._waiting) == 0:
            return
        reserve = sum(map(self._lookahead, self._running))
        first: RequestState | None = None
        position = 0
        while draft.budget > 0 and self._rows.num_free > 0 and position < MAX_MISFITS_PER_STEP:
            state = self._waiting.peek(position)
            if state is None:
                return
            hits = self._cache.match(state.chain, state.token_ids) if state.may_read_cache else []
            if self._fits(state, hits, reserve):
                self._waiting.pop(position)
                self._install(state, hits, draft)
                reserve += self._lookahead(state)
                if first is not None:
                    first.bypasses += 1
                    self.stats.bypasses += 1
            else:
                position += 1
                first = first or state
            if first is not None and first.bypasses >= self.limits.max_bypasses:
                return

    def _lookahead(self, state: RequestState) -> int:
        """Blocks that a running row will take in its next few tokens."""
        soon = min(state.target + self.limits.lookahead_tokens, state.max_kv_tokens)
        return max(0, blocks_for(soon, self.limits.block_size) - len(state.block_ids))

    def _fits(self, state: RequestState, hits: list[int], reserve: int) -> bool:
        """Whether all known tokens fit now and the next few will.

        With nobody running this is true of all that passed the door.
        """
        soon = min(len(state.token_ids) + self.limits.lookahead_tokens, state.max_kv_tokens)
        # A hit that nobody holds is counted as free, but will not be.
        taken = sum(1 for block in hits if not self._pool.is_held(block))
        needed = blocks_for(soon, self.limits.block_size) - len(hits) + taken
        return needed + reserve <= self._pool.num_free

    def _install(self, state: RequestState, hits: list[int], draft: _Draft) -> None:
        """Give a request a row and blocks for all its known tokens, and plan its first chunk."""
        block_size = self.limits.block_size
        tokens = state.token_ids
        # Hits first: what is held is not evicted for the rest.
        self._pool.share(hits)
        fresh = blocks_for(len(tokens), block_size) - len(hits)
        table = hits + self._pool.allocate(fresh)
        row, generation = self._rows.take()
        state.take_row(row, generation, table, len(table) * block_size)
        state.launched = state.committed = len(hits) * block_size
        state.registered = len(hits)
        state.cache_epoch = self._cache.epoch
        if state.cached_tokens is None:
            state.cached_tokens = state.launched
        insort(self._running, state, key=_by_rank)
        self.stats.admissions += 1
        if self._cache.enabled and state.may_read_cache:
            self.stats.prefix_cache_queries += len(tokens)
            self.stats.prefix_cache_hits += state.launched
        draft.installs.append(
            RowInstall(row, generation, state.key, list(tokens), state.prompt_len, list(table))
        )
        draft.add(state, min(len(tokens) - state.launched, draft.budget))

    # Results.

    def commit(self, result: StepResult) -> list[RequestEvent]:
        """Take in the result of the oldest launched step.

        Raises
        ------
        InvariantError
            If it is not the oldest step's, or its rows are not the plan's.
        """
        if result.step_id <= self._last_forgotten:
            return []
        if not self._in_flight or self._in_flight[0][0].step_id != result.step_id:
            oldest = self._in_flight[0][0].step_id if self._in_flight else None
            raise InvariantError(f"step {result.step_id} is committed, the oldest is {oldest}")
        plan, states = self._in_flight.popleft()
        if len(result.rows) != len(plan.rows):
            raise InvariantError(
                f"step {plan.step_id} has {len(plan.rows)} rows, its result {len(result.rows)}"
            )
        self._last_committed = plan.step_id
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
            leaving = state.phase is not Phase.RUNNING
            if state.phase is Phase.ENDED:
                self.stats.discarded_tokens += len(row.token_ids)
            else:
                event = self._commit_row(state, planned, row)
                if event is not None:
                    events.append(event)
            if leaving and state.last_step == plan.step_id:
                self._leave_fence(state)
        return events

    def _commit_row(
        self, state: RequestState, planned: RowStep, row: RowResult
    ) -> RequestEvent | None:
        if len(row.token_ids) != planned.samples:
            raise InvariantError(
                f"row {planned.row}: {len(row.token_ids)} tokens came back, "
                f"{int(planned.samples)} expected"
            )
        state.committed = planned.start + planned.num_tokens
        if state.prompt_logprobs is not None and row.prompt_logprobs is not None:
            state.collect_prompt_logprobs(planned.start, row.prompt_logprobs)
        if state.committed >= (state.registered + 1) * self.limits.block_size:
            self._register(state)
        if not planned.samples:
            return None
        token_id = row.token_ids[0]
        state.token_ids.append(token_id)
        num_output = len(state.token_ids) - state.prompt_len
        reason = stop.finish_reason(state.request, token_id, num_output)
        event = self._event(state, row, reason)
        if reason is not None:
            self._end(state)
            self._deadlines.discard(state)
        return event

    def _register(self, state: RequestState) -> None:
        """Offer the blocks that are now full of committed tokens to the prefix cache."""
        full = state.committed // self.limits.block_size
        if self._cache.enabled and state.cache_epoch == self._cache.epoch:
            for index in range(state.registered, full):
                digest = state.chain.digest(index, state.token_ids)
                self._cache.register(digest, state.block_ids[index])
        state.registered = full

    def _event(
        self,
        state: RequestState,
        row: RowResult | None = None,
        finish_reason: FinishReason | None = None,
    ) -> RequestEvent:
        """An event of a request; the first one carries what is told once."""
        token_ids = [] if row is None else row.token_ids
        stopped = row is not None and finish_reason is FinishReason.STOP
        stop_token_id = token_ids[0] if stopped else None
        logprobs = None if row is None else row.logprobs
        if state.announced:
            return RequestEvent(
                key=state.request.key,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=finish_reason,
                stop_token_id=stop_token_id,
            )
        state.announced = True
        prompt_logprobs = None
        if row is not None:
            prompt_logprobs, state.prompt_logprobs = state.prompt_logprobs, None
        return RequestEvent(
            key=state.request.key,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            cached_tokens=state.cached_tokens or 0,
        )

    # Leaving: mark at once, release behind the fence.

    def _end(self, state: RequestState) -> None:
        """End a request wherever it stands."""
        del self._requests[state.key]
        if state.phase is Phase.RUNNING:
            self._leave_running(state, Phase.ENDED)
        elif state.phase is Phase.WAITING:
            state.phase = Phase.ENDED
            self._waiting.discard(state)
        else:
            state.phase = Phase.ENDED

    def _leave_running(self, state: RequestState, phase: Phase) -> None:
        state.phase = phase
        self._running.remove(state)
        if self._needy is state:
            self._needy = None
        self._leaving.append(state)
        if state.last_step <= self._last_committed:
            self._leave_fence(state)

    def _leave_fence(self, state: RequestState) -> None:
        """Take row and blocks back: no launched step names them any more."""
        self._leaving.remove(state)
        self._pool.release(state.block_ids)
        self._rows.release(state.row, state.generation)
        state.leave_row()
        if state.phase is Phase.PREEMPTING:
            state.phase = Phase.WAITING
            self._waiting.push(state)

    # Proofs.

    def check(self) -> None:
        """Prove that blocks, rows and counters agree; O(blocks).

        Raises
        ------
        InvariantError
            With what does not.
        """
        holders = [*self._running, *self._leaving]
        self._pool.check([state.block_ids for state in holders])
        if len(holders) + self._rows.num_free != self._rows.num_rows:
            raise InvariantError(
                f"{len(holders)} rows are held and {self._rows.num_free} free "
                f"of {self._rows.num_rows}"
            )
        preempting = sum(state.phase is Phase.PREEMPTING for state in self._leaving)
        expected = len(self._waiting) + len(self._running) + preempting
        if len(self._requests) != expected:
            raise InvariantError(f"{len(self._requests)} requests, {expected} accounted for")

    def check_idle(self) -> None:
        """Prove that an idle scheduler holds nothing.

        Raises
        ------
        InvariantError
            If it has work, or a block or a row was lost.
        """
        if self.has_work or self._leaving:
            raise InvariantError(
                f"not idle: {len(self._requests)} requests, {len(self._leaving)} leaving, "
                f"{len(self._in_flight)} steps in flight"
            )
        self.check()

    def pool_is_whole(self) -> bool:
        """Whether free + cached + held blocks add up to all blocks; O(blocks)."""
        try:
            self.check()
        except InvariantError:
            return False
        return True
