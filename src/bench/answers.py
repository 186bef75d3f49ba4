"""What a client measured of one request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from src.bench.samples import Sample


class Answer(msgspec.Struct, kw_only=True):
    """Times of one answer, in seconds of one monotonic clock.

    Attributes
    ----------
    start
        When the request was sent.
    queued
        How long it had waited in the client before that.
    ttft
        From ``start`` to the first token.
    itl
        Times between deliveries of tokens; a delivery may hold several tokens.
    latency
        From ``start`` to the last token.
    prompt_tokens, output_tokens
        As counted by the server, if it does.
    cached_tokens
        Prompt tokens that the server found in its prefix cache.
    error
        Why the request failed; empty if it succeeded.
    """

    start: float = 0.0
    queued: float = 0.0
    ttft: float = 0.0
    itl: list[float] = []
    latency: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def success(self) -> bool:
        """Whether the answer is complete."""
        return not self.error

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there are none."""
        if self.output_tokens < 2:
            return 0.0
        return (self.latency - self.ttft) / (self.output_tokens - 1)


# (sample, request id) -> answer
Ask = Callable[[Sample, str], Awaitable[Answer]]


class Deliveries:
    """Fills in the times of one answer; call it for every delivery of tokens."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._last = 0.0

    def tokens(self, now: float) -> None:
        """Tokens have arrived."""
        answer = self._answer
        if not self._last:
            answer.ttft = now - answer.start
        else:
            answer.itl.append(now - self._last)
        self._last = now
        answer.latency = now - answer.start

    def end(self, now: float) -> None:
        """The answer has ended; its last token may have had no text."""
        if not self._last:
            self.tokens(now)
        self._answer.latency = now - self._answer.start
