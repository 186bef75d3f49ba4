"""A plan while it is being written, and the counters that tell what became of plans."""

from __future__ import annotations

import msgspec

from src.core.plan import BlockAppend, RowInstall, RowStep, StepPlan
from src.engine.scheduling.request_state import RequestState


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


class PlanBuilder:
    """A plan being written.

    Attributes
    ----------
    budget
        Tokens that may still be planned.
    num_tokens
        Those that are.
    prefill_limit
        Tokens of prompts that a step like this takes at most.
    states
        The requests of ``rows``, in their order.
    short
        Whether a running row had to wait for memory, or took it from another.
    """

    __slots__ = (
        "appends",
        "budget",
        "installs",
        "num_tokens",
        "prefill_limit",
        "rows",
        "short",
        "states",
        "step_id",
    )

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.num_tokens = 0
        self.prefill_limit = budget
        self.installs: list[RowInstall] = []
        self.appends: list[BlockAppend] = []
        self.rows: list[RowStep] = []
        self.states: list[RequestState] = []
        self.short = False

    def add(self, state: RequestState, num_tokens: int) -> None:
        """Plan the next tokens of a request that has a row."""
        self.rows.append(state.launch(self.step_id, num_tokens))
        self.states.append(state)
        self.budget -= num_tokens
        self.num_tokens += num_tokens

    def leave(self, budget: int) -> None:
        """Plan no more than so many tokens from here on."""
        self.budget = min(self.budget, budget)
        self.prefill_limit = min(self.prefill_limit, budget)

    def plan(self) -> StepPlan:
        """The plan as it is to be launched."""
        return StepPlan(self.step_id, self.installs, self.appends, self.rows)
