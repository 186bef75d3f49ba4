"""What the debug endpoints show of a running engine, and what ``inspect`` and ``top`` read of it.

Figures only: no prompt, no output, no token id. Times are seconds of ``time.monotonic``.
"""

from __future__ import annotations

import msgspec

from src.core.outputs import FinishReason
from src.core.plan import BlockAppend, RowStep, StepPlan
from src.core.records import ChunkRecord
from src.core.steps import StepRecord


class RequestTrack(msgspec.Struct, frozen=True, kw_only=True):
    """A completion in the timeline: its record and what it was asked for.

    The fields are those of :class:`~src.core.records.RequestRecord`; ``request_id`` and ``index``
    are its name and its place among the request's completions, ``prompt_tokens`` and
    ``max_tokens`` the length of its prompt and the bound of its output.
    """

    key: int
    request_id: str
    index: int
    prompt_tokens: int
    max_tokens: int
    arrival: float
    queued: float
    admitted: list[float]
    preempted: list[float]
    chunks: list[ChunkRecord]
    cached_tokens: int
    first_token: float | None
    last_token: float | None
    num_tokens: int
    ended: float | None
    finish_reason: FinishReason | None
    trace_id: str


class TimelineView(msgspec.Struct, frozen=True, kw_only=True):
    """The last steps and the completions that they served.

    Attributes
    ----------
    now, unix_time
        The same moment on the engine's clock and in seconds since 1970.
    bubble
        Fraction of the time with work in which the device waited for the host, since the start.
    last_step
        The newest step that is recorded, shown here or not; 0 for none.
    steps
        Oldest first.
    requests
        Completions that ended lately, oldest first, then those that are alive.
    omitted
        Completions that are alive and not listed.
    """

    now: float
    unix_time: float
    bubble: float
    last_step: int
    steps: list[StepRecord]
    requests: list[RequestTrack]
    omitted: int = 0


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One completion that is alive.

    Attributes
    ----------
    phase
        ``waiting``, ``running`` or ``preempting``; ``ended`` for one whose end is being told.
    age, waited
        Seconds since its arrival, and those of them until it got its first row.
    computed_tokens
        Positions whose KV is computed and confirmed.
    row, blocks
        Where it runs, -1 for nowhere, and how many blocks its table has.
    expires_in
        Seconds until its deadline.
    """

    key: int
    request_id: str
    index: int
    phase: str
    age: float
    waited: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    row: int
    blocks: int
    preemptions: int
    expires_in: float | None
    trace_id: str


class RequestsView(msgspec.Struct, frozen=True, kw_only=True):
    """The completions that are alive, in the order of their arrival."""

    running: int
    waiting: int
    waiting_tokens: int
    requests: list[RequestView]
    omitted: int


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of KV memory.

    Attributes
    ----------
    windows
        Per group of layers, which has block tables of its own, the tokens that a query sees; null
        is all.
    free, cached, held
        Blocks without content, with content that may be asked for again, and in use.
    references
        Number of holders -> blocks that have so many, of the held ones.
    map
        The blocks in order, cut into cells of equal size: free, cached and held ones of each.
    """

    block_size: int
    windows: list[int | None]
    num_blocks: int
    free: int
    cached: int
    held: int
    references: dict[int, int]
    map: list[tuple[int, int, int]]


class InstallView(msgspec.Struct, frozen=True):
    """A request that takes a row: a :class:`~src.core.plan.RowInstall` without its tokens."""

    row: int
    generation: int
    key: int
    num_tokens: int
    prompt_len: int
    block_ids: list[list[int]]


class PlanView(msgspec.Struct, frozen=True):
    """A :class:`~src.core.plan.StepPlan` without the tokens that it installs."""

    step_id: int
    installs: list[InstallView]
    block_appends: list[BlockAppend]
    rows: list[RowStep]

    @classmethod
    def of(cls, plan: StepPlan) -> PlanView:
        """What is shown of a plan; its lists, but for the installs, are the plan's own."""
        installs = [
            InstallView(
                install.row,
                install.generation,
                install.request_key,
                len(install.token_ids),
                install.prompt_len,
                install.block_ids,
            )
            for install in plan.installs
        ]
        return cls(plan.step_id, installs, plan.block_appends, plan.rows)
