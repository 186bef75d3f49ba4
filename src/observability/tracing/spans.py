"""Builds the spans of a request, a step or the start, after it has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    StatusCode,
    set_span_in_context,
)

from src.core.records import RequestRecord
from src.core.start_timeline import StartSpan
from src.core.steps import StepRecord
from src.observability.tracing.attributes import completion_attributes, request_attributes
from src.observability.tracing.finished_spans import FinishedSpans, Happened
from src.observability.tracing.request import CompletionTrace, PromptTrace, RequestTrace

# A request's number of spans is bounded, whatever it asks for.
MAX_COMPLETIONS: Final = 32
MAX_CHUNKS: Final = 64
# Events per span for single tokens; the SDK keeps the newest 128 events of a span.
MAX_TOKEN_EVENTS: Final = 100
# Maximal number of requests that a step's span links to.
MAX_LINKS: Final = 32


class SpanWriter:
    """Writes spans with past times.

    Parameters
    ----------
    spans
        Where they are written.
    token_every
        The decode span gets an event for every so many deliveries of tokens; 0 for none.
    """

    def __init__(self, spans: FinishedSpans, token_every: int = 0) -> None:
        self._spans = spans
        self._token_every = token_every
        # Context of the parts of the start, and the offset from their clock to time of day.
        self._startup = Context()
        self._startup_offset = 0

    def request(self, trace: RequestTrace) -> None:
        """Write all spans of a request; its own span, already started, ends last."""
        own = trace.context
        turns: list[Happened] = []
        for prompt in trace.prompts:
            turns += self._prompt(trace, own, prompt)
        firsts = [
            completion.record.first_token
            for prompt in trace.prompts
            for completion in prompt.completions
            if completion.record.first_token is not None
        ]
        if firsts:
            self._child(trace, own, "detokenize and stream", min(firsts), trace.ended)
        span, end = trace.span, trace.nanoseconds(trace.ended)
        span.update_name(f"{trace.operation} {trace.model}")
        span.set_attributes(request_attributes(trace))
        for moment, what in turns:
            span.add_event(what, timestamp=moment)
        if trace.disconnected:
            span.add_event("client disconnected", timestamp=end)
        if trace.error is not None:
            span.record_exception(trace.error, timestamp=end)
            span.set_status(StatusCode.ERROR, str(trace.error)[:200])
        span.end(end)

    def _prompt(self, trace: RequestTrace, own: Context, prompt: PromptTrace) -> list[Happened]:
        """Write the spans of one prompt; returns events for the request's own span."""
        index = trace.prompts.index(prompt)
        # Parsing of the first prompt began when the request came in.
        start = prompt.arrival if index else trace.received
        attributes = {"gen_ai.usage.input_tokens": prompt.num_tokens, "slipstream.prompt": index}
        self._child(trace, own, "parse and tokenize", start, prompt.tokenized, attributes)
        if prompt.completions:
            record, began = prompt.completions[0].record, prompt.tokenized
            if record.grammar_times is not None:
                asked, began = record.grammar_times
                self._child(trace, own, "grammar compile", asked, began, attributes)
            self._child(trace, own, "admission", began, record.queued, attributes)
        if len(trace.prompts) == len(prompt.completions) == 1:
            only = prompt.completions[0].record
            self._phases(trace, own, only)
            return _turns_before_decode(trace, only)
        for number, completion in enumerate(prompt.completions[:MAX_COMPLETIONS]):
            self._completion(trace, own, completion, index, number)
        return []

    def _completion(
        self,
        trace: RequestTrace,
        own: Context,
        completion: CompletionTrace,
        prompt: int,
        number: int,
    ) -> None:
        record = completion.record
        span = self._spans.write(
            f"completion {number}",
            own,
            trace.nanoseconds(record.queued),
            trace.nanoseconds(_end_of(record, trace)),
            {
                "slipstream.prompt": prompt,
                "slipstream.completion": number,
                **completion_attributes(record),
            },
            events=_turns_before_decode(trace, record),
            error=record.error,
        )
        self._phases(trace, _below(span, own), record)

    def _phases(self, trace: RequestTrace, parent: Context, record: RequestRecord) -> None:
        """Write queue, prefill and decode spans of one completion."""
        self._queue(trace, parent, record)
        lost = record.preempted[0] if record.preempted else None
        for index, chunk in enumerate(record.chunks[:MAX_CHUNKS]):
            self._child(
                trace,
                parent,
                "prefill",
                chunk.device_start,
                chunk.device_end,
                {
                    "slipstream.step.id": chunk.step_id,
                    "slipstream.prefill.start": chunk.start,
                    "slipstream.prefill.tokens": chunk.num_tokens,
                    "slipstream.prefill.cached_tokens": 0 if index else record.cached_tokens,
                    "slipstream.prefill.recomputed": lost is not None and chunk.device_end > lost,
                },
            )
        if record.first_token is not None:
            self._decode(trace, parent, record, record.first_token)

    def _queue(self, trace: RequestTrace, parent: Context, record: RequestRecord) -> None:
        """Write one span until admission, and another after each preemption."""
        waits = [record.queued, *record.preempted]
        for index, begin in enumerate(waits):
            resumed = index < len(record.admitted)
            end = record.admitted[index] if resumed else _end_of(record, trace)
            self._child(trace, parent, "queue", begin, end, {"slipstream.queue.preemptions": index})

    def _decode(
        self, trace: RequestTrace, parent: Context, record: RequestRecord, first: float
    ) -> None:
        assert record.last_token is not None
        turns = [turn for turn in _turns(record) if turn[0] >= first]
        last = max(record.last_token, *(moment for moment, _ in turns), 0.0)
        events = [(first, "first token"), *turns]
        if self._token_every and record.token_times:
            events += [
                (moment, "tokens")
                for moment in record.token_times[:: self._token_every][:MAX_TOKEN_EVENTS]
            ]
        self._spans.write(
            "decode",
            parent,
            trace.nanoseconds(first),
            trace.nanoseconds(last),
            {"gen_ai.usage.output_tokens": record.num_tokens},
            events=[(trace.nanoseconds(moment), name) for moment, name in sorted(events)],
        )

    def _child(
        self,
        trace: RequestTrace,
        parent: Context,
        name: str,
        start: float,
        end: float,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        begin = trace.nanoseconds(start)
        self._spans.write(name, parent, begin, trace.nanoseconds(max(start, end)), attributes)

    def step(self, record: StepRecord, links: Sequence[Link]) -> None:
        """Write one step, from planning to publication, as a trace of its own."""
        offset = _epoch_offset()
        self._spans.write(
            "step",
            None,
            _at(record.planned, offset),
            _at(record.published, offset),
            {
                "slipstream.step.id": record.step_id,
                "slipstream.step.rows": record.num_rows,
                # Counts all of them, although only the first are linked.
                "slipstream.step.traced_requests": len(links),
                "slipstream.step.tokens": record.num_tokens,
                "slipstream.step.prefill_tokens": record.prefill_tokens,
                "slipstream.step.decode_rows": record.decode_rows,
                "slipstream.step.preemptions": record.preemptions,
                "slipstream.step.idle_before": record.idle_before,
                "slipstream.step.plan": record.plan_ended - record.planned,
                "slipstream.step.launch": record.launch_ended - record.launched,
                "slipstream.step.device": record.device_end - record.device_start,
                "slipstream.step.commit": record.committed - record.commit_started,
                "slipstream.step.publish": record.published - record.publish_started,
                "slipstream.step.kv_usage": record.kv_usage,
            },
            links=links[:MAX_LINKS],
        )

    def startup(
        self, spans: Sequence[StartSpan], ended: float, error: BaseException | None
    ) -> None:
        """Write a start from its first part on; running parts are written when they end.

        If it failed with ``error``, no part is running.
        """
        self._startup_offset = offset = _epoch_offset()
        whole = self._spans.write(
            "startup",
            None,
            _at(spans[0].began, offset),
            _at(ended, offset),
            {} if error is None else {"error.type": type(error).__qualname__},
            error=error,
        )
        self._startup = _below(whole, Context())
        for span in spans:
            if span.ended is not None:
                self.startup_went_on(span)
            elif error is not None:
                self.startup_went_on(span._replace(ended=ended))

    def startup_went_on(self, span: StartSpan) -> None:
        """Write a part of a start whose span is already written; it may end later than that."""
        assert span.ended is not None
        self._spans.write(
            span.name,
            self._startup,
            _at(span.began, self._startup_offset),
            _at(span.ended, self._startup_offset),
            {} if span.error is None else {"error.type": type(span.error).__qualname__},
            error=span.error,
        )


def _below(span: SpanContext, around: Context) -> Context:
    """The context for children of a written span."""
    return set_span_in_context(NonRecordingSpan(span), around)


def _turns(record: RequestRecord) -> list[tuple[float, str]]:
    turns = [(moment, "preempted") for moment in record.preempted]
    turns += [(moment, "resumed") for moment in record.admitted[1:]]
    return sorted(turns)


def _turns_before_decode(trace: RequestTrace, record: RequestRecord) -> list[Happened]:
    """Preemptions and resumptions that lie outside of the decode span."""
    first = record.first_token
    return [
        (trace.nanoseconds(moment), what)
        for moment, what in _turns(record)
        if first is None or moment < first
    ]


def _end_of(record: RequestRecord, trace: RequestTrace) -> float:
    return trace.ended if record.ended is None else record.ended


def _epoch_offset() -> int:
    return time.time_ns() - time.monotonic_ns()


def _at(moment: float, offset: int) -> int:
    return int(moment * 1e9) + offset
