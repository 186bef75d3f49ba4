"""Writes spans of finished work, with all their data at once.

The SDK's spans are made for work in progress: they take locks, check limits one attribute at a time
and are copied at the end. That costs some 50 microseconds; with a step's 64 links, it takes as long
as the loop's own work for the step. So if the provider is ours, a span is assembled here and passed
to the processors; otherwise it goes through the SDK.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    get_current_span,
)

from src.observability.tracing.sampling import FastSampling

# (nanoseconds since the epoch, name of the event)
Happened = tuple[int, str]
_UNSET: Final = Status(StatusCode.UNSET)
_DESCRIPTION_CHARS: Final = 200
# The SDK's default limits.
_MAX_EVENTS: Final = 128
_MAX_LINKS: Final = 128


class FinishedSpans(Protocol):
    """A destination of spans with past times."""

    def write(
        self,
        name: str,
        parent: Context | None,
        start: int,
        end: int,
        attributes: Mapping[str, Any] | None = None,
        *,
        events: Sequence[Happened] = (),
        links: Sequence[Link] = (),
        error: BaseException | None = None,
    ) -> SpanContext:
        """Write one span; returns its context. Its children may be written later.

        Parameters
        ----------
        parent
            The context of the parent span; ``None`` begins a trace, which the sampler may drop.
        start, end
            Nanoseconds since the epoch.
        error
            The error with which the span ended.
        """


class TracerSpans:
    """Writes through a tracer, whose provider need not be ours."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def write(
        self,
        name: str,
        parent: Context | None,
        start: int,
        end: int,
        attributes: Mapping[str, Any] | None = None,
        *,
        events: Sequence[Happened] = (),
        links: Sequence[Link] = (),
        error: BaseException | None = None,
    ) -> SpanContext:
        """See `FinishedSpans`."""
        span = self._tracer.start_span(
            name,
            Context() if parent is None else parent,
            start_time=start,
            links=links,
            attributes=attributes,
        )
        for moment, what in events:
            span.add_event(what, timestamp=moment)
        if error is not None:
            span.record_exception(error, timestamp=end)
            span.set_status(StatusCode.ERROR, str(error)[:_DESCRIPTION_CHARS])
        span.end(end)
        return span.get_span_context()


class DirectSpans:
    """Writes straight to the processors of our own provider, with its sampling and default limits.

    Parameters
    ----------
    sampling
        Decides about new traces.
    resource, scope
        The same as those of the provider's other spans.
    processors
        Receive the spans.
    """

    def __init__(
        self,
        sampling: FastSampling,
        resource: Resource,
        scope: InstrumentationScope,
        processors: Sequence[SpanProcessor],
    ) -> None:
        self._sampling = sampling
        self._resource = resource
        self._scope = scope
        self._processors = tuple(processors)

    def write(
        self,
        name: str,
        parent: Context | None,
        start: int,
        end: int,
        attributes: Mapping[str, Any] | None = None,
        *,
        events: Sequence[Happened] = (),
        links: Sequence[Link] = (),
        error: BaseException | None = None,
    ) -> SpanContext:
        """See `FinishedSpans`."""
        above = None if parent is None else get_current_span(parent).get_span_context()
        identity = self._identity(above)
        if not identity.trace_flags.sampled:
            return identity
        told = [Event(what, {}, moment) for moment, what in events]
        status = _UNSET
        if error is not None:
            told.append(_exception_event(error, end))
            status = Status(StatusCode.ERROR, str(error)[:_DESCRIPTION_CHARS])
        span = ReadableSpan(
            name,
            identity,
            parent=above,
            resource=self._resource,
            attributes=attributes or {},
            # Like the SDK, keep the newest.
            events=told[-_MAX_EVENTS:],
            links=links[:_MAX_LINKS],
            status=status,
            start_time=start,
            end_time=end,
            instrumentation_scope=self._scope,
        )
        for processor in self._processors:
            processor.on_end(span)
        return identity

    def _identity(self, parent: SpanContext | None) -> SpanContext:
        ids = self._sampling.ids
        if parent is not None:
            return SpanContext(
                parent.trace_id,
                ids.generate_span_id(),
                False,
                parent.trace_flags,
                parent.trace_state,
            )
        trace_id = self._sampling.new_trace()
        flags = TraceFlags.DEFAULT if trace_id is None else TraceFlags.SAMPLED
        return SpanContext(trace_id or 0, ids.generate_span_id(), False, TraceFlags(flags))


def _exception_event(error: BaseException, moment: int) -> Event:
    """Follows https://opentelemetry.io/docs/specs/otel/trace/exceptions/."""
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    attributes = {
        "exception.type": module + kind.__qualname__,
        "exception.message": str(error),
        "exception.stacktrace": "".join(traceback.format_exception(error)),
        "exception.escaped": "False",
    }
    return Event("exception", attributes, moment)
