"""One record per step, for the timeline, the step spans and the debug endpoints.

Times are seconds of ``time.monotonic``.
"""

from __future__ import annotations

import msgspec


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One committed step.

    Attributes
    ----------
    planned, plan_ended
        When its planning began and ended.
    launched, launch_ended
        When it was put on the device's queue, and when the host had finished that.
    device_start, device_end
        When the device worked on it.
    arrived
        When its result, or its failure, reached the event loop.
    commit_started, committed
        When committing its result began and ended.
    publish_started, published
        When publishing to its readers began and ended. Steps that are committed in one turn of the
        loop are published together.
    idle_before
        Seconds that the device waited for this step although there was work: the bubble.
    num_rows, num_tokens
        Rows and tokens computed.
    decode_rows, prefill_tokens
        Rows that decode, and prefill tokens (also those computed again after a preemption). With
        ``drafted_tokens`` the sum is ``num_tokens``.
    drafted_tokens, accepted_tokens
        Drafts that it verified for rows that decode, and how many of them were right: tokens beyond
        one for each of these rows.
    context_tokens, attended_pairs
        Positions that its rows attend to, and pairs of a computed token and an attended position:
        measures of what attention reads and computes. For a decoding row both are its length.
    sampled_rows, pooled_rows
        Rows that sampled a token, and rows that ended with numbers: a vector, labels, a score.
    installed_rows, cached_tokens
        Rows installed by its plan, and how many of their tokens were prefix cache hits.
    preemptions
        Requests preempted since the step before was planned.
    running, waiting
        Running and waiting requests when it was planned.
    kv_usage
        Held blocks over all blocks when it was planned, 0 to 1.
    """

    step_id: int
    planned: float
    plan_ended: float
    launched: float
    launch_ended: float
    device_start: float
    device_end: float
    arrived: float
    commit_started: float
    committed: float
    publish_started: float
    published: float
    idle_before: float
    num_rows: int
    num_tokens: int
    decode_rows: int
    prefill_tokens: int
    sampled_rows: int
    installed_rows: int
    cached_tokens: int
    preemptions: int
    running: int
    waiting: int
    kv_usage: float
    context_tokens: int = 0
    attended_pairs: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    pooled_rows: int = 0
