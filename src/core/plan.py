"""The contract between the scheduler and the device: integers only.

A plan can be logged, replayed, diffed and sent to peer ranks. The device gathers a step's inputs
from its own rows, so a plan never waits for a token that only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from src.core.adapter import NO_ADAPTER, NO_SLOT
from src.core.outputs import TokenLogprobs

NO_BLOCK: Final = -1
"""Entry of a block table whose block was released because the window has passed it."""


class RowInstall(msgspec.Struct, frozen=True):
    """A request takes a row: at admission, and again when it resumes after preemption.

    Attributes
    ----------
    row, generation
        The row, and how often it was given out. Results of an older generation are refused.
    request_key
        The request that takes the row.
    token_ids
        All tokens known so far: the prompt and, after preemption, the output.
    prompt_len
        How many of them are the prompt.
    block_ids
        Its block tables so far, one per group of layers.
    adapter, adapter_slot
        Key of its adapter, and the slot that the adapter has while the row has its request. The
        device half brings the adapter there unless it is there already.
    """

    row: int
    generation: int
    request_key: int
    token_ids: list[int]
    prompt_len: int
    block_ids: list[list[int]]
    adapter: int = NO_ADAPTER
    adapter_slot: int = NO_SLOT


class BlockAppend(msgspec.Struct, frozen=True):
    """Blocks that are appended to a row's block table of one group, from ``index`` on."""

    row: int
    group: int
    index: int
    block_ids: list[int]


class StateCopy(msgspec.Struct, frozen=True):
    """A copy between a row's recurrent states and a snapshot slot. The plan says which way."""

    row: int
    slot: int


class RowStep(msgspec.Struct, frozen=True):
    """The next tokens of one row: positions ``start`` to ``start + num_tokens - 1``.

    If ``samples``, the last of them is the row's last known token, and the step samples the token
    at position ``start + num_tokens``. If it ``pools``, the last of them is the prompt's last, and
    the step gives a vector in place of a token. Otherwise this is a prefill chunk with more to
    come.

    With drafts the step verifies: behind the last known token come up to ``drafts`` tokens that the
    device has guessed, and the step samples behind the known one and behind each of them. So it
    gives 1 to ``1 + drafts`` tokens. How many is not known before the step is committed. Meanwhile
    the plans of later steps have bounds, and the device begins where the row really ends.

    Attributes
    ----------
    drafts
        How many of ``num_tokens`` are drafts, at most.
    slack
        The row begins up to this many positions behind ``start``: steps in flight draft for it.
    limit
        With drafts or slack: the most tokens that the row may have, those to be sampled included.
        A row that has them already computes nothing, and gives no token.
    pools
        Whether it gives a vector.
    again
        How many of ``num_tokens`` a step has computed before, and recurrent states lack since
        drafts behind them were wrong. Only the device half knows.
    """

    row: int
    generation: int
    start: int
    num_tokens: int
    samples: bool
    drafts: int = 0
    slack: int = 0
    limit: int = 0
    pools: bool = False
    again: int = 0

    @property
    def verifies(self) -> bool:
        """Whether its tokens are to be rounded as steps of one token each round them."""
        return self.drafts > 0 or self.again > 0

    @property
    def num_sampled(self) -> int:
        """Tokens that the step samples for the row, at most."""
        return 1 + self.drafts if self.samples else 0


class StepPlan(msgspec.Struct, frozen=True):
    """One step. ``installs`` and ``block_appends`` are applied before ``rows`` are computed.

    Attributes
    ----------
    state_loads
        Installed rows whose recurrent states are copied from a slot, before anything is computed.
        Those of the other installed rows become zero.
    state_saves
        Rows whose recurrent states are copied to a slot when the step is computed.
    """

    step_id: int
    installs: list[RowInstall]
    block_appends: list[BlockAppend]
    rows: list[RowStep]
    state_loads: list[StateCopy] = []
    state_saves: list[StateCopy] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes; at most, where it verifies drafts."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_drafts(self) -> int:
        """How many of them are drafts, at most."""
        return sum(row.drafts for row in self.rows)


class RowResult(msgspec.Struct, frozen=True):
    """The result of one row's step.

    Attributes
    ----------
    token_ids
        Sampled tokens in order; empty for a prefill chunk with more to come. Of a step that
        verifies drafts: as many as the drafts allowed, and the one behind them.
    logprobs
        One entry per sampled token, when asked for.
    prompt_logprobs
        Entries for prompt positions ``start + 1 .. start + num_tokens`` that lie inside the prompt,
        when asked for.
    drafted, accepted
        Drafts that the step has verified, and how many of them were right.
    source
        Who has guessed them.
    rests
        Steps for which the device expects no drafts of the row. Those steps may be planned exactly.
        -1: it expects some from now on, whatever it said before.
    vector
        Of a row that is pooled, when its prompt ends: its vector, its scores, or those of each of
        its tokens, one after the other; float32, in this machine's byte order.
    """

    row: int
    generation: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    drafted: int = 0
    rests: int = 0
    vector: bytes | None = None
    accepted: int = 0
    source: str = ""

    def first(self, count: int) -> RowResult:
        """The same with its first ``count`` tokens only."""
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        return msgspec.structs.replace(self, token_ids=self.token_ids[:count], logprobs=logprobs)


class RowFailure(NamedTuple):
    """The key of a request that cannot go on, and the reason.

    ``is_own``: the request's own parameters are the cause; otherwise the server is.
    """

    key: int
    reason: str
    is_own: bool = True


class StepResult(msgspec.Struct, frozen=True):
    """The device's result for one plan; ``rows`` are in the plan's order.

    Tokens sampled for requests that cannot go on are meaningless.

    Attributes
    ----------
    failures
        Requests whose grammar allows no next token.
    refused
        Key and reason of each request that could not be installed in its row.
    unsound
        Indices (in the plan) of rows with invalid logits: NaN or +inf among them, or only -inf;
        or with a vector that has a NaN or an infinity.
    """

    step_id: int
    rows: list[RowResult]
    failures: Sequence[RowFailure] = ()
    refused: Sequence[tuple[int, str]] = ()
    unsound: Sequence[int] = ()


class StepTimes(msgspec.Struct):
    """The times of one step, in seconds of ``time.monotonic``.

    ``device_start`` and ``device_end`` are the device's times. On CUDA events measure the time
    between them, and ``device_end`` is when the host saw the completion. ``planned`` and
    ``plan_ended`` are the begin and end of planning. ``launched`` is when the step was put on the
    device's queue, ``launch_ended`` when the host had finished that, ``arrived`` when the result or
    the failure reached the event loop.
    """

    launched: float
    planned: float = 0.0
    plan_ended: float = 0.0
    launch_ended: float = 0.0
    device_start: float = 0.0
    device_end: float = 0.0
    arrived: float = 0.0


def drafted_tokens(result: StepResult) -> tuple[int, int]:
    """How many drafts a step has verified, and how many of them were right."""
    drafting = [row for row in result.rows if row.drafted]
    # Mostly there are none, and every step is asked.
    if not drafting:
        return 0, 0
    return sum(row.drafted for row in drafting), sum(row.accepted for row in drafting)


def has_computed(plan: StepPlan, result: StepResult) -> bool:
    """Whether a step has computed anything: behind drafts all of its rows may have ended."""
    return any(row.token_ids for row in result.rows) or not all(row.samples for row in plan.rows)
