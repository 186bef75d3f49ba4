"""Spans of what is over, with all that is known of them at once.

The SDK's way to a span is made for one that is still open: locks, limits checked one attribute at a
time, a copy at the end. That takes some 50 microseconds, and with a step's 64 links as long as the
loop takes for the step. Where the provider is ours, a span is therefore put together here and given
to the processors; elsewhere it goes the SDK's way.
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

# A moment, in nanoseconds since the epoch, and what happened then.
Happened = tuple[int, str]
_UNSET: Final = Status(StatusCode.UNSET)
_DESCRIPTION_CHARS: Final = 200
# The SDK's defaults.
_MAX_EVENTS: Final = 128
_MAX_LINKS: Final = 128


class FinishedSpans(Protocol):
    """Where spans with times of the past go."""

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
        """Write one span; returns its identity. Its children are written later.

        Parameters
        ----------
        parent
            The context of the span above; ``None`` begins a trace, which the sampler may drop.
        start, end
            Nanoseconds since the epoch.
        error
            What the span ended with.
        """


class TracerSpans:
    """By a tracer of a provider that may be anybody's."""

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
        """See :class:`FinishedSpans`."""
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
    """Straight to the processors of our own provider, with its sampling and the default limits.

    Parameters
    ----------
    sampling
        Decides for new traces.
    resource, scope
        What the provider's other spans have.
    processors
        What they go to.
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
        """See :class:`FinishedSpans`."""
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
            # As the SDK does: the newest are kept.
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
    """By the conventions, https://opentelemetry.io/docs/specs/otel/trace/exceptions/."""
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    attributes = {
        "exception.type": module + kind.__qualname__,
        "exception.message": str(error),
        "exception.stacktrace": "".join(traceback.format_exception(error)),
        "exception.escaped": "False",
    }
    return Event("exception", attributes, moment)
