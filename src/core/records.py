"""The record of one completion's events and times, from which metrics, traces and logs are made.

Times are seconds of ``time.monotonic``.
"""

from __future__ import annotations

import msgspec

from src.core.outputs import FinishReason


class ChunkRecord(msgspec.Struct, frozen=True):
    """One prefill chunk: of a prompt, or of tokens computed again after a preemption.

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
    """The life of one completion, written while it runs.

    Attributes
    ----------
    arrival
        When its request reached the engine, before it was tokenized.
    grammar_times
        When its grammar was requested, and when it was ready; ``None`` without one.
    queued
        When it was put into the waiting queue.
    admitted
        When it got a row; one entry per admission.
    preempted
        When it was preempted; one entry per preemption.
    chunks
        Its prefill, chunk by chunk.
    cached_tokens
        Prompt tokens whose KV came from the prefix cache at first admission.
    first_token, last_token
        When its first and its newest token were committed.
    num_tokens
        Output tokens so far.
    drafted, accepted
        Drafts that were verified for it so far, and those of them that its output has.
    ended, finish_reason, error
        When and why it ended, and the failure that ended it.
    token_times
        When its tokens were delivered; only if its trace records token times.
    lora
        Name of its adapter; empty for the model alone.
    trace_id
        Its trace, 32 hexadecimal digits; empty if it is not sampled.
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
    drafted: int = 0
    accepted: int = 0
    ended: float | None = None
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    token_times: list[float] | None = None
    lora: str = ""
    trace_id: str = ""
