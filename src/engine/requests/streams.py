"""From committed tokens to a reader's deltas: a stream per request, a choice per completion."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from src.core.errors import SlipstreamError
from src.core.outputs import Delta, FinishReason, RequestEvent, TokenLogprobs, Usage
from src.core.records import RequestRecord
from src.core.request import Request
from src.observability.tracing import RequestTrace
from src.text.output import OutputText

# Takes a whole delta at once and returns True, or returns False and leaves it untouched.
Sink: TypeAlias = Callable[[Delta], bool]


class RequestStream:
    """Holds the deltas of one request until its reader takes them.

    Deltas of one choice coalesce while the reader is slow, so the waiting deltas are bounded by the
    output itself, and a reader that never reads does not disturb others.

    ``predicts``: whether the request came with a prediction, whose tokens its usage counts.
    """

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        num_choices: int,
        *,
        predicts: bool = False,
    ) -> None:
        self.request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._unfinished = num_choices
        self._completion_tokens = 0
        self._cached_tokens = 0
        # Tokens of the prediction that were right and wrong, of all choices.
        self._predicted: tuple[int, int] | None = (0, 0) if predicts else None
        self._pending: dict[int, list[Delta]] = {}
        self._error: SlipstreamError | None = None
        # The reader waits for this future. An asyncio event would cost more than all other work
        # for a token.
        self._news: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        # While the reader waits for the end: whether to wake it before that.
        self._enough: Callable[[], bool] | None = None
        # Output tokens of the longest completion that has ended.
        self.longest = 0

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended without a failure."""
        return self._unfinished == 0

    @property
    def finished(self) -> bool:
        """Whether no choice will produce anything more."""
        return self._unfinished == 0 or self._error is not None

    @property
    def usage(self) -> Usage:
        """Tokens so far, over all choices."""
        return Usage(
            self._num_prompt_tokens,
            self._completion_tokens,
            self._cached_tokens,
            *(self._predicted or (None, None)),
        )

    def count(self, index: int, num_tokens: int, cached_tokens: int) -> None:
        """Account for newly committed tokens of a choice."""
        self._completion_tokens += num_tokens
        # Only the first choice counts: the others hit the blocks that it has just computed.
        if index == 0:
            self._cached_tokens = max(self._cached_tokens, cached_tokens)

    def count_predicted(self, drafted: int, accepted: int) -> None:
        """Account for tokens of the prediction that a step has tried, and those the output has."""
        right, wrong = self._predicted or (0, 0)
        self._predicted = (right + accepted, wrong + drafted - accepted)

    def put(self, delta: Delta) -> None:
        """Add the next delta of a choice, or give it to the sink."""
        sink = self._sink
        if sink is not None and delta.finish_reason is None and sink(delta):
            return
        self._sink = None
        self._pending.setdefault(delta.index, []).append(delta)
        if delta.finish_reason is not None:
            self._unfinished -= 1
        enough = self._enough
        if enough is None or self.finished or enough():
            self._tell()

    def fail(self, error: SlipstreamError) -> None:
        """End the stream with an error. Waiting deltas are still delivered before it."""
        if not self.finished:
            self._error = error
            self._tell()

    def divert(self, sink: Sink) -> None:
        """Give the next deltas to ``sink`` as they are made, without waking the reader.

        This ends when the sink refuses a delta, or with the last delta; the reader then gets that
        delta. A wake-up costs more than all other work for a token.
        """
        if not self._pending and not self.finished:
            self._sink = sink

    def _tell(self) -> None:
        news = self._news
        if news is not None and not news.done():
            news.set_result(None)

    async def wait_end(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Wait for the end. Deltas that come before are kept and do not wake the reader.

        ``enough`` is called for each delta. If it returns true, this returns before the end.
        """
        self._sink, self._enough = None, enough
        try:
            while not self.finished and not enough():
                self._news = asyncio.get_running_loop().create_future()
                await self._news
        finally:
            self._enough = None

    async def take(self) -> list[Delta]:
        """Wait for deltas and return one per choice that has any; an empty list at the end.

        Raises
        ------
        SlipstreamError
            The error that was given to `fail`.
        """
        if self._pending:
            # Without this a reader that always has data would never yield to the event loop.
            await asyncio.sleep(0)
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._unfinished == 0:
                return []
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        pending, self._pending = self._pending, {}
        return [deltas[0] if len(deltas) == 1 else _joined(deltas) for deltas in pending.values()]


def _joined(deltas: list[Delta]) -> Delta:
    last = deltas[-1]
    logprobs: list[TokenLogprobs] | None = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    step_starts: list[int] = []
    begin = 0
    for delta in deltas:
        step_starts += [begin + start for start in delta.begins_steps]
        begin += len(delta.token_ids)
    return Delta(
        request_id=last.request_id,
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=next(
            (delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None
        ),
        usage=last.usage,
        step_starts=step_starts,
    )


class Choice:
    """One completion: turns the scheduler's events into deltas of its stream."""

    def __init__(
        self, request: Request, index: int, text: OutputText, stream: RequestStream
    ) -> None:
        self.request = request
        self.index = index
        self.finished = False
        self.num_tokens = 0
        # Whether it has stop strings, so that its text is needed before the next step is planned.
        self.watches_text = bool(request.params.stop)
        self.record = RequestRecord(
            arrival=request.arrival,
            queued=time.monotonic(),
            grammar_times=request.grammar_times,
            lora="" if request.adapter is None else request.adapter.name,
        )
        # Its trace, and the pieces of its text if the trace records them.
        self.trace: RequestTrace | None = None
        self.pieces: list[str] | None = None
        self._text = text
        self._stream = stream

    def follow(self, trace: RequestTrace) -> None:
        """Make it part of a trace."""
        self.trace = trace
        self.record.trace_id = trace.trace_id
        if trace.token_times:
            self.record.token_times = []
        if trace.content_chars:
            self.pieces = []

    @property
    def request_id(self) -> str:
        """The caller's name for the request."""
        return self._stream.request_id

    @property
    def longest_of_request(self) -> int | None:
        """Output tokens of the request's longest completion; ``None`` until all have ended."""
        return self._stream.longest if self._stream.is_complete else None

    def take(self, event: RequestEvent) -> FinishReason | None:
        """Turn an event into a delta; returns why the choice ended, if it did.

        If a stop string ended it, the scheduler does not know that; the caller has to end the
        request there. Tokens after the one that completed the stop string are dropped.
        """
        if event.finish_reason is None and not self.watches_text:
            if event.drafted:
                self._count_drafts(event, len(event.token_ids))
            self._go_on(event)
            return None
        token_ids, finish_reason = event.token_ids, event.finish_reason
        stop_reason: str | int | None = None
        shown: Sequence[int] = token_ids
        if event.stop_token_id is not None:
            if event.stop_token_id in self.request.params.stop_token_ids:
                stop_reason = event.stop_token_id
            if not self.request.params.include_stop_str_in_output:
                shown = token_ids[:-1]
        delta = self._text.push(shown)
        text = delta.text
        if delta.stop is None and finish_reason is not None:
            text += self._text.finish()
        if self._text.stop is not None:
            finish_reason, stop_reason = FinishReason.STOP, self._text.stop
            if delta.stop is not None:
                token_ids = token_ids[: delta.num_tokens]
        if event.drafted:
            self._count_drafts(event, len(token_ids))
        if self.pieces is not None:
            self.pieces.append(text)
        self.num_tokens += len(token_ids)
        self.finished = finish_reason is not None
        if self.finished:
            self._stream.longest = max(self._stream.longest, self.num_tokens)
        self._stream.count(self.index, len(token_ids), event.cached_tokens)
        self._stream.put(
            Delta(
                request_id=self._stream.request_id,
                index=self.index,
                text=text,
                token_ids=token_ids,
                logprobs=None if event.logprobs is None else event.logprobs[: len(token_ids)],
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                prompt_logprobs=self._prompt_logprobs(event.prompt_logprobs),
                usage=self._stream.usage,
                vector=event.vector,
            )
        )
        return finish_reason

    def _count_drafts(self, event: RequestEvent, num_tokens: int) -> None:
        """Account for a step's drafts, of which the output has no more than ``num_tokens``."""
        accepted = min(event.accepted, num_tokens)
        self.record.drafted += event.drafted
        self.record.accepted += accepted
        if event.source == "prediction":
            self._stream.count_predicted(event.drafted, accepted)

    def _go_on(self, event: RequestEvent) -> None:
        """The fast path of `take`: more tokens, no end, and no stop strings to look for."""
        token_ids, stream = event.token_ids, self._stream
        text = self._text.go_on(token_ids)
        if self.pieces is not None:
            self.pieces.append(text)
        self.num_tokens += len(token_ids)
        stream.count(self.index, len(token_ids), event.cached_tokens)
        stream.put(
            Delta(
                request_id=stream.request_id,
                index=self.index,
                text=text,
                token_ids=token_ids,
                logprobs=event.logprobs,
                prompt_logprobs=self._prompt_logprobs(event.prompt_logprobs),
                usage=stream.usage,
            )
        )

    def _prompt_logprobs(
        self, entries: list[TokenLogprobs] | None
    ) -> list[TokenLogprobs | None] | None:
        # The first prompt token follows nothing, so it has no probability.
        return None if entries is None or self.index else [None, *entries]

    def fail(self, error: SlipstreamError) -> None:
        """End the whole request with an error."""
        self.finished = True
        self._stream.fail(error)
