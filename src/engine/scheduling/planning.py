"""Fills a step: chunks of prompts, admissions, and room for rows that grow."""

from __future__ import annotations

import sys
from collections.abc import Callable

from src.engine.kv.prefix_cache import Match
from src.engine.scheduling.admission import (
    MAX_MISFITS_PER_STEP,
    MAX_PREFIX_WAITS_PER_STEP,
    SchedulerLimits,
)
from src.engine.scheduling.plan_builder import PlanBuilder, SchedulerStats
from src.engine.scheduling.request_state import Phase, RequestState
from src.engine.scheduling.row_allocator import RowAllocator
from src.engine.scheduling.waiting import Lane, WaitingQueue


class StepPlanner:
    """Fills steps in order of rank, for requests that are all of one tenant.

    Parameters
    ----------
    preempt
        Takes the row of a running request, which waits again behind its fence.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        allocator: RowAllocator,
        waiting: WaitingQueue,
        stats: SchedulerStats,
        preempt: Callable[[RequestState], None],
    ) -> None:
        self.limits = limits
        self.allocator = allocator
        self.waiting = waiting
        self.stats = stats
        self.preempt = preempt
        # Positions that a row with drafts keeps behind them: one for each step that may be planned
        # before theirs is committed.
        self.kept = max(1, limits.max_in_flight - 1)

    def begin(self) -> None:
        """Begin a step; blocks that were lent for drafts come back if somebody may want them."""
        allocator = self.allocator
        if allocator.borrowers and (
            len(self.waiting) or allocator.pool.num_free < allocator.longest
        ):
            allocator.take_back_lent(self.kept)

    def fill(self, builder: PlanBuilder, prefills: list[RequestState]) -> None:
        """Plan prompts: those of running requests by rank, and then of waiting ones by rank."""
        self.plan_chunks(prefills, builder)
        if not builder.short:
            for lane in self.waiting.lanes.values():
                self.admit(lane, builder)
        if builder.halves_pooled:
            builder.top_up()

    def plan_chunks(self, prefills: list[RequestState], builder: PlanBuilder) -> None:
        """Plan chunks of running requests in this order, as long as the budget allows."""
        for state in prefills:
            if builder.budget == 0:
                return
            if state.phase is Phase.RUNNING and builder.room(state):
                self._plan_chunk(state, builder)

    def _plan_chunk(self, state: RequestState, builder: PlanBuilder) -> None:
        """Plan a prefill chunk of a running row, as long as budget and memory allow."""
        num_tokens = builder.chunk(state)
        if state.launched + num_tokens > state.capacity:
            # Only groups with a sliding window can lack blocks here. The other groups got theirs
            # at admission.
            builder.appends += self.allocator.extend(state, num_tokens)
            if state.launched == state.capacity and not self.grow(state, builder):
                return
            num_tokens = min(num_tokens, state.capacity - state.launched)
        builder.add(state, num_tokens)

    def draft(self, builder: PlanBuilder) -> None:
        """Let rows that sample one token verify drafts, as far as budget and memory are left.

        Drafts take nothing from anybody: they get tokens that nobody wanted, and further blocks
        only while no request waits and the look-ahead of all rows stays free
        (`RowAllocator.extend_for_drafts`). How many of them the device really has is another
        matter, so rows share what there is evenly.

        Each draft is one more position to sample, with logits of the whole vocabulary. So drafts
        fill a step up to ``SchedulerLimits.max_sampled`` such positions, which memory is sized for.
        """
        wanted = self._wanted_drafts(builder)
        if not wanted:
            return
        limits, allocator = self.limits, self.allocator
        sampled = sum([step.num_sampled for step in builder.rows])
        most = min(limits.max_num_batched_tokens - builder.num_tokens, limits.max_sampled - sampled)
        # Found out once, and only if a row wants blocks.
        spare = -1 if len(self.waiting) else None
        for given, (drafts, index) in enumerate(sorted(wanted)):
            if most < 1:
                return
            # What a row does not want is for those that want more.
            drafts = min(drafts, -(-most // (len(wanted) - given)))
            state = builder.states[index]
            room = self._draft_room(state)
            if drafts > room and (spare is None or spare >= 0):
                if spare is None:
                    spare = allocator.spare_blocks()
                appends, spare = allocator.extend_for_drafts(state, drafts + self.kept, spare)
                builder.appends += appends
                room = self._draft_room(state)
            drafts = min(drafts, room)
            if drafts > 0:
                builder.rows[index] = state.draft(builder.rows[index], drafts)
                builder.num_tokens += drafts
                most -= drafts

    def _wanted_drafts(self, builder: PlanBuilder) -> list[tuple[int, int]]:
        """(drafts, index in the plan) of each row that may have some: as many as are of use.

        None where the step copies the row's recurrent states, nor up to where a later one does:
        that must know where they stand.
        """
        # Mostly all rows rest, and every step asks.
        states = builder.states
        if all([state.rests for state in states]):  # noqa: C419
            for state in states:
                state.rests -= 1
            return []
        wanted: list[tuple[int, int]] = []
        snapshots = builder.snapshots
        saved = {save.row for save in builder.saves} if builder.saves else ()
        for index, state in enumerate(builder.states):
            if state.rests:
                state.rests -= 1
                continue
            step = builder.rows[index]
            if step.num_tokens != 1 or not step.samples or state.phase is not Phase.RUNNING:
                continue
            if step.row in saved:
                continue
            # The first token may be the last: then there is nothing to draft.
            drafts = min(self.limits.drafts, state.limit - (step.start + 2))
            if snapshots is not None:
                drafts = min(drafts, snapshots.until_next(state) - 1)
            if drafts > 0:
                wanted.append((drafts, index))
        return wanted

    def _draft_room(self, state: RequestState) -> int:
        """Positions for drafts in the blocks that a row has.

        The next ``kept`` steps are planned as if all of them were right, so each needs a position
        behind them. Without it such a step would want a block, perhaps for nothing. Where the row's
        blocks reach to its end, all drafts have room: none is written behind that.
        """
        if state.capacity >= state.max_kv_tokens:
            return state.limit
        return state.capacity - state.launched - self.kept

    def grow(self, state: RequestState, builder: PlanBuilder) -> bool:
        """Give a running row its next blocks, preempting others if need be; false if it waits."""
        allocator = self.allocator
        groups = allocator.short_groups(state)
        while allocator.pool.num_free < len(groups):
            if allocator.take_back_lent(self.kept):
                # Perhaps from this row too.
                groups = allocator.short_groups(state)
                continue
            builder.short = True
            # While steps in flight will free blocks anyway, nobody else is preempted, nor for a
            # block that is needed only if drafts in flight are right.
            spares = state.slack > 0 or allocator.blocks_are_coming()
            victim = None if spares else allocator.victim(state)
            if victim is None:
                self.stats.shortages += 1
                return False
            self.preempt(victim)
        builder.appends += allocator.append_blocks(state, groups)
        return True

    def admit(
        self, lane: Lane, builder: PlanBuilder, most: int = sys.maxsize
    ) -> RequestState | None:
        """Give rows to waiting requests of a lane, ``most`` at most, in order of rank.

        Returns the first request that did not fit; ``None`` if there was none.
        """
        allocator = self.allocator
        # Every admission needs a row and at least one block: a prefix hit never covers everything.
        if not (len(self.waiting) and allocator.rows.num_free and allocator.pool.num_free):
            return None
        self.waiting.bring_back()
        reserve = sum(map(allocator.lookahead, allocator.running))
        first: RequestState | None = None
        misfits = waits = admitted = 0
        while (
            builder.budget > 0
            and allocator.rows.num_free > 0
            and misfits < MAX_MISFITS_PER_STEP
            and waits < MAX_PREFIX_WAITS_PER_STEP
            and admitted < most
        ):
            state = lane.peek(misfits + waits)
            if state is None:
                return first
            if not allocator.adapters.admits(state.request.adapter):
                self.waiting.set_aside(lane, misfits + waits)
                continue
            if not builder.room(state):
                # Requests for text behind a flood of vectors must not wait for all of it.
                lane.set_aside(misfits + waits)
                continue
            match = allocator.cached_prefix(state)
            if state.bypasses < self.limits.max_bypasses and allocator.waits_for_prefix(
                state, match, builder.prefill_limit
            ):
                waits += 1
            elif self._takes(state, builder) and allocator.fits(state, match, reserve):
                self.waiting.pop(lane, misfits + waits)
                self._install(state, match, builder)
                admitted += 1
                reserve += allocator.lookahead(state)
                if first is not None:
                    first.bypasses += 1
                    self.stats.bypasses += 1
            else:
                misfits += 1
                first = first or state
            if first is not None and first.bypasses >= self.limits.max_bypasses:
                return first
        return first

    def _takes(self, state: RequestState, builder: PlanBuilder) -> bool:
        """Whether the step has room for the request's prompt, if it may not be cut."""
        return not self.limits.whole_prompts or len(state.token_ids) <= builder.budget

    def _install(self, state: RequestState, match: Match, builder: PlanBuilder) -> None:
        builder.install(self.allocator.install(state, match), state, match)
        self.stats.admissions += 1
        if self.limits.enable_prefix_caching and state.may_read_cache:
            self.stats.prefix_cache_queries += state.target
            self.stats.prefix_cache_hits += state.launched
        self._plan_chunk(state, builder)
