"""Views of a running engine for the debug endpoints, and so for ``inspect`` and ``top``.

Figures only: no prompt, no output, no token id. Times are seconds of ``time.monotonic``.
"""

from __future__ import annotations

import msgspec

from src.core.outputs import FinishReason
from src.core.plan import BlockAppend, RowStep, StepPlan
from src.core.records import ChunkRecord
from src.core.steps import StepRecord
from src.core.task import Task


class RequestTrack(msgspec.Struct, frozen=True, kw_only=True):
    """A completion in the timeline: its record and its request's sizes.

    Most fields are those of `RequestRecord`. ``index`` is its index among the request's
    completions. ``prompt_tokens`` is the length of its prompt, ``max_tokens`` the limit of its
    output. ``task`` is what it asks for.
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
    drafted: int
    accepted: int
    ended: float | None
    finish_reason: FinishReason | None
    trace_id: str
    task: Task = "generate"


class TimelineView(msgspec.Struct, frozen=True, kw_only=True):
    """The last steps and the completions that they served.

    Attributes
    ----------
    now, unix_time
        The same moment on the engine's clock and in seconds since 1970.
    bubble
        Fraction of the time with work in which the device waited for the host, since the start.
    last_step
        The newest recorded step, even if it is not listed here; 0 for none.
    steps
        Oldest first.
    requests
        Recently ended completions, oldest first, then unfinished ones.
    omitted
        Number of unfinished completions that are not listed.
    """

    now: float
    unix_time: float
    bubble: float
    last_step: int
    steps: list[StepRecord]
    requests: list[RequestTrack]
    omitted: int = 0


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One unfinished completion.

    Attributes
    ----------
    tenant
        Name of the owner of its API key; empty where owners are not told apart.
    phase
        ``waiting``, ``running`` or ``preempting``; ``ended`` if only its last event is outstanding.
    age, waited
        Seconds since its arrival, and seconds from arrival to its first row.
    computed_tokens
        Positions whose KV is committed.
    drafted_tokens, accepted_tokens
        Drafts that were verified for it, and those of them that its output has.
    row, blocks
        Its row, -1 without one, and the number of blocks that it holds.
    expires_in
        Seconds until its deadline; ``None`` without one.
    task
        What it asks for.
    """

    key: int
    request_id: str
    index: int
    tenant: str
    phase: str
    age: float
    waited: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    max_tokens: int
    row: int
    blocks: int
    preemptions: int
    expires_in: float | None
    trace_id: str
    task: Task = "generate"


class RequestsView(msgspec.Struct, frozen=True, kw_only=True):
    """The unfinished completions, in the order of their arrival."""

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
        Per group of layers: the most tokens that a query sees; null is all.
    free, cached, held
        Blocks without content, with reusable content, and in use.
    references
        Reference count -> number of held blocks with that count.
    map
        The blocks in order, cut into cells of equal size; (free, cached, held) counts per cell.
    whole_prompts
        Whether a text is computed in one step, because its tokens see later ones.
    """

    block_size: int
    windows: list[int | None]
    num_blocks: int
    free: int
    cached: int
    held: int
    references: dict[int, int]
    map: list[tuple[int, int, int]]
    whole_prompts: bool = False


class InstallView(msgspec.Struct, frozen=True):
    """A request that takes a row: a `RowInstall` without its tokens."""

    row: int
    generation: int
    key: int
    num_tokens: int
    prompt_len: int
    block_ids: list[list[int]]


class PlanView(msgspec.Struct, frozen=True):
    """A `StepPlan` without the tokens that it installs."""

    step_id: int
    installs: list[InstallView]
    block_appends: list[BlockAppend]
    rows: list[RowStep]

    @classmethod
    def of(cls, plan: StepPlan) -> PlanView:
        """The view of a plan. It shares the plan's lists, except the installs."""
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
