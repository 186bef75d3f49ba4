"""The state of one request between its arrival and its last event.

::

    WAITING    -- admit -->    RUNNING     takes a row and blocks
    RUNNING    -- preempt -->  PREEMPTING  keeps both, is no longer planned
    PREEMPTING -- fence -->    WAITING     tokens kept, row and KV given up
    any        -- end -->      ENDED       row and blocks are given up at the fence

Two counters advance at different times. ``launched`` counts the positions that the device was told
to compute, ``committed`` those whose results have come back. Between them are the steps in flight.

A step that verifies drafts gives one token or several. While such a step is in flight, ``launched``
and ``target`` are the most that they can be, and ``slack`` is how much less they may be.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from src.core.outputs import FinishReason, RequestEvent, TokenLogprobs
from src.core.plan import RowResult, RowStep
from src.core.request import Request
from src.engine.kv.hash_chain import HashChain
from src.engine.kv.prefix_cache import Match

# (priority class, arrival number): smaller goes first. Unique; a request keeps it for life.
Rank = tuple[int, int]
# (priority class, start in virtual time, whether it is of a call, arrival number): see `places`.
Place = tuple[int, int, bool, int]


UNTOLD: Final = 1 << 40
"""``rests`` of a row that has given no token yet; each of its steps takes one off."""
MOST_TOLD: Final = 1 << 32
"""No result says that a row rests for so long."""


class Phase(enum.Enum):
    """The phase of a request; the module's diagram shows the transitions."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTING = "preempting"
    ENDED = "ended"


class RequestState(msgspec.Struct, eq=False, kw_only=True):
    """What the scheduler knows of one request.

    Attributes
    ----------
    key, prompt_len
        Copies of the request's key and its number of prompt tokens.
    rank
        Its place in every order of requests that run: planning, preemption.
    place
        Its place among those that wait in its lane; kept for life. ``None`` while others of its
        call, or others that are alone, are before it and not yet looked at.
    lane
        Whose requests it is served with (``SchedulerLimits.lane_of``).
    chain
        Digests of its full blocks. The completions of one request share those of the prompt.
    match
        While it waits: its cached prefix, as found at the last attempt to admit it.
    in_progress
        While it runs: digest of the next block that it fills, if other requests may wait for it.
    prefix_leader
        Key of the running request last considered as one to wait for, and whether to wait for it.
    token_ids
        The prompt and the committed output.
    limit
        The most tokens that it may have, prompt and output together.
    phase
        Only the scheduler and its allocator change it.
    row, generation
        Its row on the device, from admission until the fence has passed; -1 without a row.
    block_ids
        Its block tables, one per group of layers.
    behind
        Per group: the number of blocks at the table's beginning that the window has passed. They
        were released, and ``NO_BLOCK`` is in their place.
    capacity
        Positions that the shortest of its tables has blocks for.
    launched
        Positions whose KV the launched steps compute, at most.
    target
        Tokens that exist once the launched steps are done, at most: ``token_ids`` and the sampled
        ones.
    slack
        How much less than ``launched`` and ``target`` it may be: 0 unless a step in flight drafts.
    rests
        Steps that are planned without drafts for it, since the device has none. Above
        `MOST_TOLD`: its row has given no token yet, and the result of the first one says whether
        there are some.
    ahead
        The most tokens that each step in flight samples for it; of those that sample, in order.
    committed
        Positions whose KV is computed by committed steps.
    registered
        Full blocks that were offered to the prefix cache, hits included.
    cache_epoch
        The prefix cache's epoch at admission.
    snapshots_due
        Positions at which its recurrent states are to be copied, in ascending order.
    last_step
        The last launched step that names it. Once that is committed, its fence has passed.
    bypasses
        Admissions that overtook this request while it was first in line and did not fit.
    cached_tokens
        Prompt tokens found in the prefix cache at the first admission; ``None`` before.
    announced
        Whether its first event was made.
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
    lane: str = ""
    place: Place | None = None
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
    slack: int = 0
    rests: int = 0
    ahead: list[int] = []
    committed: int = 0
    registered: int = 0
    cache_epoch: int = 0
    snapshots_due: list[int] = []
    last_step: int = 0
    bypasses: int = 0
    cached_tokens: int | None = None
    announced: bool = False
    prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def max_kv_tokens(self) -> int:
        """The most positions of KV it can need: the KV of the last token is never computed."""
        return self.limit - 1

    @property
    def certain(self) -> int:
        """Positions whose KV the launched steps compute at least, however few drafts are right."""
        return self.launched - self.slack

    @property
    def is_exhausted(self) -> bool:
        """Whether its last token is launched: it ends once the steps in flight are committed."""
        return self.target - self.slack >= self.limit

    @property
    def may_read_cache(self) -> bool:
        """Whether it may use cached prefixes.

        Not while it needs logits of its prompt, nor if its vector needs more than the last token's
        hidden state: tokens that are not computed have none.
        """
        return self.prompt_logprobs is None and self.request.pooling in (None, "last")

    def held_blocks(self) -> list[list[int]]:
        """Per group of layers: the blocks that it holds, in the table's order."""
        return [
            table[behind:] if behind else table
            for table, behind in zip(self.block_ids, self.behind, strict=True)
        ]

    def launch(self, step_id: int, num_tokens: int) -> RowStep:
        """Advance by ``num_tokens`` positions, which step ``step_id`` computes."""
        self.last_step = step_id
        if self.slack:
            return self._launch_behind_drafts()
        start = self.launched
        self.launched = start + num_tokens
        samples = self.launched == self.target
        if samples:
            self.target += 1
            if self.request.pooling is not None:
                return RowStep(self.row, self.generation, start, num_tokens, False, pools=True)
            self.ahead.append(1)
        return RowStep(self.row, self.generation, start, num_tokens, samples)

    def _launch_behind_drafts(self) -> RowStep:
        """Advance by one token, from where the steps in flight leave the row."""
        start, slack = self.launched - self.slack, self.slack
        self.ahead.append(1)
        self._bound()
        return RowStep(self.row, self.generation, start, 1, True, 0, slack, self.limit)

    def draft(self, step: RowStep, drafts: int) -> RowStep:
        """Let a step that was just launched, for one token, verify this many drafts as well."""
        self.ahead[-1] += drafts
        self._bound()
        return RowStep(
            self.row, self.generation, step.start, 1 + drafts, True, drafts, step.slack, self.limit
        )

    def settle(self) -> None:
        """A step that samples was committed, and its tokens taken in."""
        if self.ahead.pop(0) > 1 or self.slack:
            self._bound()

    def _bound(self) -> None:
        """What the steps in flight compute, if they sample: at least a token each."""
        known = len(self.token_ids)
        self.target = min(known + sum(self.ahead), self.limit)
        self.launched = self.target - 1
        self.slack = self.target - min(known + len(self.ahead), self.limit)

    def take_row(
        self,
        row: int,
        generation: int,
        block_ids: list[list[int]],
        behind: list[int],
        capacity: int,
    ) -> None:
        """Enter phase RUNNING with this row and these block tables."""
        self.phase = Phase.RUNNING
        self.row = row
        self.generation = generation
        self.block_ids = block_ids
        self.behind = behind
        self.capacity = capacity

    def start_from(self, num_cached: int, *, registered: int, epoch: int) -> None:
        """Begin computing behind the first ``num_cached`` positions, whose KV is cached."""
        self.launched = self.committed = num_cached
        self.target = len(self.token_ids)
        self.registered = registered
        self.cache_epoch = epoch
        if self.cached_tokens is None:
            self.cached_tokens = num_cached

    def leave_row(self) -> None:
        """Forget the row and the blocks. The tokens and their digests stay."""
        self.row = self.generation = -1
        self.block_ids = []
        self.behind = []
        self.snapshots_due = []
        self.ahead = []
        self.slack = self.rests = 0
        self.capacity = self.launched = self.target = self.committed = self.registered = 0

    def collect_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Add a chunk's entries, for prompt positions from ``start + 1``.

        After preemption a chunk is computed again. Entries that are there already are skipped.
        """
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(entries[len(self.prompt_logprobs) - start :])

    def event(
        self, row: RowResult | None = None, finish_reason: FinishReason | None = None
    ) -> RequestEvent:
        """The event for a row's tokens, an end, or both.

        The first event of a request also has its cached tokens and prompt log-probabilities.
        """
        if self.announced and finish_reason is None and row is not None and not row.drafted:
            # Nearly all events are this one.
            return RequestEvent(key=self.key, token_ids=row.token_ids, logprobs=row.logprobs)
        token_ids = [] if row is None else row.token_ids
        ended_by_token = bool(token_ids) and finish_reason is FinishReason.STOP
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
            stop_token_id=token_ids[-1] if ended_by_token else None,
            cached_tokens=cached_tokens,
            vector=None if row is None else row.vector,
            drafted=0 if row is None else row.drafted,
            # Right ones behind the token that ended the request are none of its output.
            accepted=0 if row is None else min(row.accepted, len(token_ids)),
            source="" if row is None else row.source,
        )
