"""What happened to one completion, and when: what metrics, traces and logs are made of.

Times are seconds of ``time.monotonic``, the engine's one clock.
"""

from __future__ import annotations

import msgspec

from src.core.outputs import FinishReason


class ChunkRecord(msgspec.Struct, frozen=True):
    """One step's share of a prompt, or of what is computed again after a preemption.

    Attributes
    ----------
    step_id
        The step that computed it.
    start, num_tokens
        Positions ``start`` to ``start + num_tokens - 1``.
    device_start, device_end
        When the device worked on that step.
    """

    step_id: int
    start: int
    num_tokens: int
    device_start: float
    device_end: float


class RequestRecord(msgspec.Struct, kw_only=True):
    """The life of one completion, written as it goes.

    Attributes
    ----------
    arrival
        When its request reached the engine, before it was tokenized.
    grammar_times
        When its grammar was asked for, and when it was compiled or found; ``None`` without one.
    queued
        When it was put into the waiting queue.
    admitted
        When it was given a row; again after each preemption.
    preempted
        When it lost its row.
    chunks
        Its prefill, chunk by chunk.
    cached_tokens
        Prompt tokens whose KV came from the prefix cache at first admission.
    first_token, last_token
        When its first and its newest token were committed.
    num_tokens
        Output tokens so far.
    ended, finish_reason, error
        When and why it ended, and the failure that ended it.
    token_times
        When its tokens were delivered, one by one; only where its trace is to have that.
    trace_id
        Its trace, 32 hexadecimal digits; empty when it is not sampled.
    """

    arrival: float
    queued: float
    grammar_times: tuple[float, float] | None = None
    admitted: list[float] = []
    preempted: list[float] = []
    chunks: list[ChunkRecord] = []
    cached_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    ended: float | None = None
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    token_times: list[float] | None = None
    trace_id: str = ""
