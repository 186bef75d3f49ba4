"""A step plan under construction, and the scheduler's counters."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from src.core.plan import BlockAppend, RowInstall, RowStep, StateCopy, StepPlan
from src.engine.kv.prefix_cache import Match
from src.engine.scheduling.request_state import Phase, RequestState
from src.engine.scheduling.snapshots import Snapshots


class SchedulerStats(msgspec.Struct):
    """Counters since the start; they only grow.

    Attributes
    ----------
    steps, scheduled_tokens
        Plans made, and the tokens in them.
    admissions, preemptions
        Rows given to requests (a resumed request counts again), and requests preempted.
    yields
        Those of the preempted requests that gave way to a waiting one of a tenant below its share.
    recomputed_tokens
        Positions whose KV was lost by preemption.
    prefix_cache_queries, prefix_cache_hits
        Tokens looked up and found in the prefix cache, at admissions that may read it.
    bypasses
        Admissions that overtook the first waiting request, which did not fit.
    shortages
        How often a row was left out of a step because no block was free.
    discarded_tokens
        Tokens sampled for requests that had ended meanwhile: the cost of the pipeline's depth.
    """

    steps: int = 0
    scheduled_tokens: int = 0
    admissions: int = 0
    preemptions: int = 0
    yields: int = 0
    recomputed_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    bypasses: int = 0
    shortages: int = 0
    discarded_tokens: int = 0


class Grant(NamedTuple):
    """Prompt tokens that somebody may have of a step, and how many of them for pooled requests."""

    tokens: int
    pooled: int


class PlanBuilder:
    """A plan being written.

    Attributes
    ----------
    budget
        Tokens that may still be planned.
    num_tokens
        Tokens that are planned.
    prefill_limit
        The most prompt tokens that this step may take.
    pooled_budget
        Tokens of pooled requests that may still be planned, within ``budget``.
    halves_pooled
        Whether a pooled request that does not end in this step gets at most half of its room, so
        that others have a part too.
    states
        The requests of ``rows``, in their order.
    short
        Whether a running row had to wait for memory, or got it by preempting another.
    snapshots
        Says when recurrent states are copied; ``None`` if the model has none.
    """

    __slots__ = (
        "appends",
        "budget",
        "halves_pooled",
        "installs",
        "loads",
        "num_tokens",
        "pooled_budget",
        "prefill_limit",
        "rows",
        "saves",
        "short",
        "snapshots",
        "states",
        "step_id",
    )

    def __init__(self, step_id: int, budget: int, snapshots: Snapshots | None = None) -> None:
        self.step_id = step_id
        self.snapshots = snapshots
        self.budget = budget
        self.num_tokens = 0
        self.prefill_limit = budget
        self.pooled_budget = budget
        self.halves_pooled = False
        self.installs: list[RowInstall] = []
        self.appends: list[BlockAppend] = []
        self.rows: list[RowStep] = []
        self.states: list[RequestState] = []
        self.loads: list[StateCopy] = []
        self.saves: list[StateCopy] = []
        self.short = False

    def add(self, state: RequestState, num_tokens: int) -> None:
        """Plan the next tokens of a request that has a row."""
        self.rows.append(state.launch(self.step_id, num_tokens))
        self.states.append(state)
        self._spend(state, num_tokens)
        if self.snapshots is not None and (save := self.snapshots.take(state)) is not None:
            self.saves.append(save)

    def _spend(self, state: RequestState, num_tokens: int) -> None:
        self.budget -= num_tokens
        self.num_tokens += num_tokens
        if state.request.pooling is not None:
            self.pooled_budget -= num_tokens

    def room(self, state: RequestState) -> int:
        """Prompt tokens that the request may still have in this step."""
        if state.request.pooling is None:
            return self.budget
        return min(self.budget, self.pooled_budget)

    def install(self, install: RowInstall, state: RequestState, match: Match) -> None:
        """Plan that a request takes a row, and begins behind the prefix that was found."""
        self.installs.append(install)
        if self.snapshots is not None:
            self.loads += self.snapshots.begin(state, match)

    def chunk(self, state: RequestState, *, takes_rest: bool = False) -> int:
        """Tokens of a request's next chunk: what is missing, its room, or up to a snapshot.

        With ``takes_rest`` nothing of its room is kept for others.
        """
        missing, room = state.target - state.launched, self.room(state)
        if (
            self.halves_pooled
            and not takes_rest
            and state.request.pooling is not None
            and missing > room
        ):
            room = -(-room // 2)
        num_tokens = min(missing, room)
        return num_tokens if self.snapshots is None else self.snapshots.cut(state, num_tokens)

    def set_apart(self, grant: Grant) -> Grant:
        """Leave only ``grant`` of the remaining tokens; returns the others for `rejoin`."""
        others = Grant(self.budget - grant.tokens, self.pooled_budget - grant.pooled)
        self.budget, self.pooled_budget = grant
        return others

    def rejoin(self, others: Grant) -> Grant:
        """Give back the tokens set apart; returns how many of those left then are left now."""
        left = Grant(self.budget, self.pooled_budget)
        self.budget += others.tokens
        self.pooled_budget += others.pooled
        return left

    def top_up(self, pooled_of: str | None = None) -> None:
        """Make chunks of prompts that end early longer, as far as their blocks and the budget go.

        A chunk whose states are copied at its end stays as it is.

        Parameters
        ----------
        pooled_of
            A lane, if only its pooled requests are to get more.
        """
        saved = {save.row for save in self.saves}
        for index, (state, row) in enumerate(zip(self.states, self.rows, strict=True)):
            if not self.budget:
                return
            room = min(state.target, state.capacity) - state.launched
            if (
                row.samples
                or row.pools
                or row.row in saved
                or state.phase is not Phase.RUNNING
                or (pooled_of is not None and not _is_pooled_of(pooled_of, state))
                or room < 1
                or self.room(state) < 1
            ):
                continue
            num_tokens = min(self.chunk(state, takes_rest=True), room)
            more = state.launch(self.step_id, num_tokens)
            self.rows[index] = RowStep(
                row.row,
                row.generation,
                row.start,
                row.num_tokens + num_tokens,
                more.samples,
                pools=more.pools,
            )
            self._spend(state, num_tokens)
            if self.snapshots is not None and (save := self.snapshots.take(state)) is not None:
                self.saves.append(save)

    def leave(self, budget: int) -> None:
        """Lower the remaining budget and the prefill limit to ``budget`` tokens."""
        self.budget = min(self.budget, budget)
        self.prefill_limit = min(self.prefill_limit, budget)

    def leave_pooled(self, budget: int) -> None:
        """Lower the remaining budget of pooled requests, and let none that is long take all."""
        self.pooled_budget = min(self.pooled_budget, budget)
        self.halves_pooled = True

    def plan(self) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            self.step_id, self.installs, self.appends, self.rows, self.loads, self.saves
        )


def _is_pooled_of(lane: str, state: RequestState) -> bool:
    return state.lane == lane and state.request.pooling is not None
