"""One request's life between arrival and its last event.

::

    WAITING    -- admit -->    RUNNING     takes a row and blocks
    RUNNING    -- preempt -->  PREEMPTING  keeps both, is not planned any more
    PREEMPTING -- fence -->    WAITING     tokens kept, row and KV given up
    any        -- end -->      ENDED       row and blocks are given up at the fence

Two counters run at different speeds. ``launched`` is what the device was told to compute,
``committed`` what is known to have come back. Between them lie the steps in flight.
"""

from __future__ import annotations

import enum

import msgspec

from src.core.outputs import FinishReason, RequestEvent, TokenLogprobs
from src.core.plan import RowResult, RowStep
from src.core.request import Request
from src.engine.kv.prefix_cache import HashChain, Match

# (priority class, arrival number): smaller goes first. Unique, kept for life.
Rank = tuple[int, int]


class Phase(enum.Enum):
    """Where a request stands; the module's diagram has the transitions."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTING = "preempting"
    ENDED = "ended"


class RequestState(msgspec.Struct, eq=False, kw_only=True):
    """What the scheduler knows of one request.

    Attributes
    ----------
    key, prompt_len
        The request's, at hand.
    rank
        Its place in every order: admission, planning, memory.
    chain
        Digests of its full blocks; those of a prompt are shared by its completions.
    match
        Its prefix in the cache as of the last try to admit it, while it waits.
    in_progress
        While it runs: digest of its next full block that is not in the cache yet, if it is the one
        that others may wait for.
    prefix_leader
        Key of the running request that was last looked at as one to wait for, and whether to.
    token_ids
        The prompt and the committed output.
    limit
        Tokens it may have at most, prompt and output together.
    phase
        Only the scheduler changes it.
    row, generation
        Where its device state is, while it is running or behind its fence.
    block_ids
        Its block tables, one for each group of layers.
    behind
        Per group, the blocks at the table's beginning that a window has gone past: they were given
        back, and ``NO_BLOCK`` is in their place.
    capacity
        Positions that all of its tables hold.
    launched
        Positions whose KV the launched steps compute.
    target
        Tokens that exist once the launched steps are done: ``token_ids`` and those being sampled.
    committed
        Positions whose KV is computed by committed steps.
    registered
        Full blocks that were offered to the prefix cache.
    cache_epoch
        The prefix cache's epoch at admission.
    last_step
        The last launched step that names it; its fence has passed once that is committed.
    bypasses
        Admissions of later requests while this one was first in line and did not fit.
    cached_tokens
        Prompt tokens found in the prefix cache at first admission; ``None`` before.
    announced
        Whether it had its first event.
    prompt_logprobs
        Entries collected so far, for prompt positions from 1; ``None`` once delivered or when not
        asked for.
    """

    request: Request
    key: int
    rank: Rank
    chain: HashChain
    token_ids: list[int]
    prompt_len: int
    limit: int
    match: Match | None = None
    in_progress: bytes | None = None
    prefix_leader: tuple[int, bool] | None = None
    phase: Phase = Phase.WAITING
    row: int = -1
    generation: int = -1
    block_ids: list[list[int]] = []
    behind: list[int] = []
    capacity: int = 0
    launched: int = 0
    target: int = 0
    committed: int = 0
    registered: int = 0
    cache_epoch: int = 0
    last_step: int = 0
    bypasses: int = 0
    cached_tokens: int | None = None
    announced: bool = False
    prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def max_kv_tokens(self) -> int:
        """Positions of KV it can ever need: the last token's is never computed."""
        return self.limit - 1

    @property
    def is_exhausted(self) -> bool:
        """Whether all its tokens are launched: it ends when the steps in flight are committed."""
        return self.target >= self.limit

    @property
    def may_read_cache(self) -> bool:
        """Whether cached KV may stand for computing: not while prompt logits are still owed."""
        return self.prompt_logprobs is None

    def held_blocks(self) -> list[list[int]]:
        """Per group of layers, the blocks that it holds, in their order."""
        return [
            table[behind:] if behind else table
            for table, behind in zip(self.block_ids, self.behind, strict=True)
        ]

    def launch(self, step_id: int, num_tokens: int) -> RowStep:
        """Note that step ``step_id`` computes the next ``num_tokens`` positions, and say which."""
        start = self.launched
        self.launched = start + num_tokens
        samples = self.launched == self.target
        if samples:
            self.target += 1
        self.last_step = step_id
        return RowStep(self.row, self.generation, start, num_tokens, samples)

    def take_row(
        self,
        row: int,
        generation: int,
        block_ids: list[list[int]],
        behind: list[int],
        capacity: int,
    ) -> None:
        """Start running on a row with block tables of ``capacity`` positions."""
        self.phase = Phase.RUNNING
        self.row = row
        self.generation = generation
        self.block_ids = block_ids
        self.behind = behind
        self.capacity = capacity

    def start_from(self, num_cached: int, *, registered: int, epoch: int) -> None:
        """Begin computing behind ``num_cached`` positions whose KV is there already."""
        self.launched = self.committed = num_cached
        self.target = len(self.token_ids)
        self.registered = registered
        self.cache_epoch = epoch
        if self.cached_tokens is None:
            self.cached_tokens = num_cached

    def leave_row(self) -> None:
        """Forget the row and the blocks; the tokens and their digests stay."""
        self.row = self.generation = -1
        self.block_ids = []
        self.behind = []
        self.capacity = self.launched = self.target = self.committed = self.registered = 0

    def collect_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Add a chunk's entries, for prompt positions from ``start + 1``.

        A chunk that is computed again after preemption brings entries that are there already.
        """
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(entries[len(self.prompt_logprobs) - start :])

    def event(
        self, row: RowResult | None = None, finish_reason: FinishReason | None = None
    ) -> RequestEvent:
        """What to tell about it: a row's tokens, an end, or both. The first one tells more."""
        if self.announced and finish_reason is None and row is not None:
            # Nearly all events are this one.
            return RequestEvent(key=self.key, token_ids=row.token_ids, logprobs=row.logprobs)
        token_ids = [] if row is None else row.token_ids
        ended_by_token = row is not None and finish_reason is FinishReason.STOP
        prompt_logprobs = None
        cached_tokens = 0
        if not self.announced:
            self.announced = True
            cached_tokens = self.cached_tokens or 0
            if row is not None:
                prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return RequestEvent(
            key=self.key,
            token_ids=token_ids,
            logprobs=None if row is None else row.logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=token_ids[0] if ended_by_token else None,
            cached_tokens=cached_tokens,
        )
