"""From what is known of an ended request or start to spans, all of them built afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import StatusCode, Tracer, set_span_in_context

from src.core.records import RequestRecord
from src.observability.tracing.attributes import completion_attributes, request_attributes
from src.observability.tracing.request import CompletionTrace, PromptTrace, RequestTrace

# Spans of one request are bounded, whatever it asks for.
MAX_COMPLETIONS: Final = 32
MAX_CHUNKS: Final = 64
# Events for single tokens: the SDK keeps 128 of a span's, the newest.
MAX_TOKEN_EVENTS: Final = 100


class SpanWriter:
    """Writes spans with times of the past.

    Parameters
    ----------
    tracer
        Where they go.
    token_every
        An event in the decode span for every so many deliveries of tokens; 0 is none.
    """

    def __init__(self, tracer: Tracer, token_every: int = 0) -> None:
        self._tracer = tracer
        self._token_every = token_every

    def request(self, trace: RequestTrace) -> None:
        """All spans of a request; its own, which is already started, ends last."""
        for prompt in trace.prompts:
            self._prompt(trace, prompt)
        firsts = [
            completion.record.first_token
            for prompt in trace.prompts
            for completion in prompt.completions
            if completion.record.first_token is not None
        ]
        if firsts:
            self._child(trace, trace.context, "detokenize and stream", min(firsts), trace.ended)
        span, end = trace.span, trace.nanoseconds(trace.ended)
        span.update_name(f"{trace.operation} {trace.model}")
        span.set_attributes(request_attributes(trace))
        if trace.disconnected:
            span.add_event("client disconnected", timestamp=end)
        if trace.error is not None:
            span.record_exception(trace.error, timestamp=end)
            span.set_status(StatusCode.ERROR, str(trace.error)[:200])
        span.end(end)

    def _prompt(self, trace: RequestTrace, prompt: PromptTrace) -> None:
        index = trace.prompts.index(prompt)
        # The first prompt's parsing began when the request came in.
        start = prompt.arrival if index else trace.received
        attributes = {"gen_ai.usage.input_tokens": prompt.num_tokens, "slipstream.prompt": index}
        self._child(trace, trace.context, "parse and tokenize", start, prompt.tokenized, attributes)
        if prompt.completions:
            record, began = prompt.completions[0].record, prompt.tokenized
            if record.grammar_times is not None:
                asked, began = record.grammar_times
                self._child(trace, trace.context, "grammar compile", asked, began, attributes)
            self._child(trace, trace.context, "admission", began, record.queued, attributes)
        alone = len(trace.prompts) == len(prompt.completions) == 1
        for number, completion in enumerate(prompt.completions[:MAX_COMPLETIONS]):
            if alone:
                self._phases(trace, trace.context, completion, trace.span.add_event)
            else:
                self._completion(trace, completion, index, number)

    def _completion(
        self, trace: RequestTrace, completion: CompletionTrace, prompt: int, number: int
    ) -> None:
        record = completion.record
        span = self._tracer.start_span(
            f"completion {number}",
            trace.context,
            start_time=trace.nanoseconds(record.queued),
            attributes={
                "slipstream.prompt": prompt,
                "slipstream.completion": number,
                **completion_attributes(record),
            },
        )
        self._phases(trace, set_span_in_context(span), completion, span.add_event)
        end = trace.nanoseconds(_end_of(record, trace))
        if record.error is not None:
            span.record_exception(record.error, timestamp=end)
            span.set_status(StatusCode.ERROR, str(record.error)[:200])
        span.end(end)

    def _phases(
        self,
        trace: RequestTrace,
        context: Context,
        completion: CompletionTrace,
        add_event: Callable[..., None],
    ) -> None:
        """Queue, prefill and decode of one completion; the events belong to decode or around it."""
        record = completion.record
        self._queue(trace, context, record)
        lost = record.preempted[0] if record.preempted else None
        for index, chunk in enumerate(record.chunks[:MAX_CHUNKS]):
            self._child(
                trace,
                context,
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
        first = record.first_token
        turns = [(moment, "preempted") for moment in record.preempted]
        turns += [(moment, "resumed") for moment in record.admitted[1:]]
        for moment, name in sorted(turns):
            if first is None or moment < first:
                add_event(name, timestamp=trace.nanoseconds(moment))
        if first is not None:
            self._decode(trace, context, record, [turn for turn in turns if turn[0] >= first])

    def _queue(self, trace: RequestTrace, context: Context, record: RequestRecord) -> None:
        """Once until it is admitted, and again after each preemption."""
        waits = [record.queued, *record.preempted]
        for index, begin in enumerate(waits):
            resumed = index < len(record.admitted)
            end = record.admitted[index] if resumed else _end_of(record, trace)
            self._child(
                trace, context, "queue", begin, end, {"slipstream.queue.preemptions": index}
            )

    def _decode(
        self,
        trace: RequestTrace,
        context: Context,
        record: RequestRecord,
        turns: Sequence[tuple[float, str]],
    ) -> None:
        assert record.first_token is not None
        assert record.last_token is not None
        last = max(record.last_token, *(moment for moment, _ in turns), 0.0)
        span = self._tracer.start_span(
            "decode",
            context,
            start_time=trace.nanoseconds(record.first_token),
            attributes={"gen_ai.usage.output_tokens": record.num_tokens},
        )
        events = [(record.first_token, "first token"), *turns]
        if self._token_every and record.token_times:
            events += [
                (moment, "tokens")
                for moment in record.token_times[:: self._token_every][:MAX_TOKEN_EVENTS]
            ]
        for moment, name in sorted(events):
            span.add_event(name, timestamp=trace.nanoseconds(moment))
        span.end(trace.nanoseconds(last))

    def _child(
        self,
        trace: RequestTrace,
        context: Context,
        name: str,
        start: float,
        end: float,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        span = self._tracer.start_span(
            name, context, attributes=attributes, start_time=trace.nanoseconds(start)
        )
        span.end(trace.nanoseconds(max(start, end)))

    def startup(
        self, phases: Sequence[tuple[str, float]], ended: float, error: BaseException | None
    ) -> None:
        """A start: phases in order, each with the moment it began."""
        offset = _epoch_offset()
        span = self._tracer.start_span("startup", Context(), start_time=_at(phases[0][1], offset))
        context = set_span_in_context(span)
        ends = [begin for _, begin in phases[1:]] + [ended]
        for (name, begin), end in zip(phases, ends, strict=True):
            child = self._tracer.start_span(name, context, start_time=_at(begin, offset))
            child.end(_at(end, offset))
        if error is not None:
            span.record_exception(error, timestamp=_at(ended, offset))
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(StatusCode.ERROR, str(error)[:200])
        span.end(_at(ended, offset))


def _end_of(record: RequestRecord, trace: RequestTrace) -> float:
    return trace.ended if record.ended is None else record.ended


def _epoch_offset() -> int:
    return time.time_ns() - time.monotonic_ns()


def _at(moment: float, offset: int) -> int:
    return int(moment * 1e9) + offset
