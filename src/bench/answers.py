"""What a client saw of one request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from src.bench.samples import Sample


class Answer(msgspec.Struct, kw_only=True):
    """When the tokens of one answer came; all times in seconds, of one monotonic clock.

    Attributes
    ----------
    start
        When it was sent.
    queued
        How long it had waited for its turn in the client before that.
    ttft
        From ``start`` to the first token.
    itl
        Between one delivery of tokens and the next; a delivery may hold several tokens.
    latency
        From ``start`` to the last token.
    prompt_tokens, output_tokens
        As the server counts them, where it does.
    cached_tokens
        Of the prompt, those that the server had computed before.
    error
        Why there is no answer; empty for a good one.
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
        """Whether it was answered to its end."""
        return not self.error

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 where there is none."""
        if self.output_tokens < 2:
            return 0.0
        return (self.latency - self.ttft) / (self.output_tokens - 1)


# (sample, request id) -> answer
Ask = Callable[[Sample, str], Awaitable[Answer]]


class Deliveries:
    """Clock of one answer: told of every delivery of tokens, it fills in the times."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._last = 0.0

    def tokens(self, now: float) -> None:
        """Tokens came."""
        answer = self._answer
        if not self._last:
            answer.ttft = now - answer.start
        else:
            answer.itl.append(now - self._last)
        self._last = now
        answer.latency = now - answer.start

    def end(self, now: float) -> None:
        """The end came, with a last token that has no text or without any."""
        if not self._last:
            self.tokens(now)
        self._answer.latency = now - self._answer.start
