"""Durations of the phases of a completion, from its record."""

from __future__ import annotations

from typing import NamedTuple

from src.core.records import RequestRecord


class Durations(NamedTuple):
    """Durations in seconds; ``None`` for phases that a completion never reached.

    Attributes
    ----------
    queue
        In the waiting queue, until its first admission.
    first_token
        From arrival to its first token.
    prefill, decode, inference
        From its first admission to its first token, from that to its last token, and both.
    per_token
        Mean time between two of its tokens; ``None`` with fewer than two. Too small if its first
        delivery has several tokens.
    whole
        From arrival to the end, or to its last known event.
    """

    queue: float | None
    first_token: float | None
    prefill: float | None
    decode: float | None
    inference: float | None
    per_token: float | None
    whole: float

    @classmethod
    def of(cls, record: RequestRecord) -> Durations:
        """The durations of a completion that has ended."""
        first, last = record.first_token, record.last_token
        admitted = record.admitted[0] if record.admitted else None
        queue = None if admitted is None else admitted - record.queued
        whole = (record.ended or last or record.queued) - record.arrival
        if first is None or last is None or admitted is None:
            return cls(queue, None, None, None, None, None, whole)
        gaps = record.num_tokens - 1
        return cls(
            queue=queue,
            first_token=first - record.arrival,
            prefill=first - admitted,
            decode=last - first,
            inference=last - admitted,
            per_token=(last - first) / gaps if gaps > 0 else None,
            whole=whole,
        )
