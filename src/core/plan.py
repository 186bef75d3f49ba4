"""The contract between the scheduler and the device: integers only.

A plan can be logged, replayed, diffed and sent to peer ranks. The device gathers a step's inputs
from its own rows, so a plan never waits for a token that only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from src.core.outputs import TokenLogprobs

NO_BLOCK: Final = -1
"""Stands in a block table where a window has gone past: nobody looks there any more."""


class RowInstall(msgspec.Struct, frozen=True):
    """A request takes a row: at admission, and again when it resumes after preemption.

    Attributes
    ----------
    row, generation
        The row and how often it has been handed out; a result of an older generation is refused.
    request_key
        Whose parameters the row carries.
    token_ids
        All tokens known so far: the prompt and, after preemption, the output.
    prompt_len
        How many of them are the prompt.
    block_ids
        Its block tables so far, one for each group of layers, in order.
    """

    row: int
    generation: int
    request_key: int
    token_ids: list[int]
    prompt_len: int
    block_ids: list[list[int]]


class BlockAppend(msgspec.Struct, frozen=True):
    """Blocks that continue a row's block table of one group of layers at ``index``."""

    row: int
    group: int
    index: int
    block_ids: list[int]


class RowStep(msgspec.Struct, frozen=True):
    """The next tokens of one row: positions ``start`` to ``start + num_tokens - 1``.

    ``samples`` says that the last of them is the row's last known token, so the step samples the
    token at position ``start + num_tokens``. Otherwise it is a prefill chunk with more to come.
    """

    row: int
    generation: int
    start: int
    num_tokens: int
    samples: bool


class StepPlan(msgspec.Struct, frozen=True):
    """One step. ``installs`` and ``block_appends`` are applied before ``rows`` are computed."""

    step_id: int
    installs: list[RowInstall]
    block_appends: list[BlockAppend]
    rows: list[RowStep]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.num_tokens for row in self.rows)


class RowResult(msgspec.Struct, frozen=True):
    """What one row's step produced.

    Attributes
    ----------
    token_ids
        Sampled tokens in order; empty for a prefill chunk with more to come.
    logprobs
        One entry per sampled token, when asked for.
    prompt_logprobs
        Entries for prompt positions ``start + 1 .. start + num_tokens`` that lie inside the prompt,
        when asked for.
    """

    row: int
    generation: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class RowFailure(NamedTuple):
    """A request, by its key, that cannot go on, and why.

    ``is_own`` says that its own parameters have led it there; the server has otherwise.
    """

    key: int
    reason: str
    is_own: bool = True


class StepResult(msgspec.Struct, frozen=True):
    """What came back from the device for one plan; ``rows`` in the plan's order.

    What the rows of requests that cannot go on have sampled means nothing.

    Attributes
    ----------
    failures
        Requests, by their key, which grammars have led into a dead end.
    refused
        Requests, by their key, that could not be installed in their row, and why.
    unsound
        Rows, by their index in the plan, whose logits allow no choice: there is a NaN or +inf among
        them, or nothing but -inf.
    """

    step_id: int
    rows: list[RowResult]
    failures: Sequence[RowFailure] = ()
    refused: Sequence[tuple[int, str]] = ()
    unsound: Sequence[int] = ()


class StepTimes(msgspec.Struct):
    """When things happened to one step, in seconds of ``time.monotonic``.

    ``device_start`` and ``device_end`` are what the device itself saw; on CUDA they are measured by
    events and anchored at the completion that the host saw. ``planned`` and ``plan_ended`` enclose
    the planning. ``launched`` is when the step was handed to the device's queue, ``launch_ended``
    when the host was done with that, ``arrived`` when the result, or the step's failure, reached
    the event loop.
    """

    launched: float
    planned: float = 0.0
    plan_ended: float = 0.0
    launch_ended: float = 0.0
    device_start: float = 0.0
    device_end: float = 0.0
    arrived: float = 0.0
