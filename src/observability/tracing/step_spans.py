"""A span per step, linked to the requests that the step served.

With 64 rows the SDK takes as long for the links of one such span as the loop takes for the step,
and most of it for the attributes that links do not have. Where the provider is ours, a finished
span is therefore put together here and given to the processors; a link is made once per request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags, Tracer

from src.core.steps import StepRecord
from src.observability.tracing.sampling import FastSampling

# Requests that a step's span is linked to, at most.
MAX_LINKS: Final = 64
_NAME: Final = "step"


class StepSpans(Protocol):
    """Writes the span of a step, from its planning to its publication, on a trace of its own."""

    def write(self, record: StepRecord, links: Sequence[Link]) -> None:
        """The step is over; ``links`` lead to the sampled requests that it served."""


class TracerStepSpans:
    """By a tracer of a provider that may be anybody's."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def write(self, record: StepRecord, links: Sequence[Link]) -> None:
        """See :class:`StepSpans`."""
        start, end = _times(record)
        span = self._tracer.start_span(
            _NAME,
            Context(),
            start_time=start,
            links=links[:MAX_LINKS],
            attributes=_attributes(record),
        )
        span.end(end)


class DirectStepSpans:
    """Straight to the processors of our own provider, with the same sampling and limits.

    Parameters
    ----------
    sampling
        Decides for the new trace of each step.
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
        most = SpanLimits().max_links
        self._max_links = MAX_LINKS if most is None else min(most, MAX_LINKS)

    def write(self, record: StepRecord, links: Sequence[Link]) -> None:
        """See :class:`StepSpans`."""
        ids = self._sampling.ids
        trace_id = self._sampling.new_trace()
        if trace_id is None:
            return
        start, end = _times(record)
        span = ReadableSpan(
            _NAME,
            SpanContext(trace_id, ids.generate_span_id(), False, TraceFlags(TraceFlags.SAMPLED)),
            resource=self._resource,
            attributes=_attributes(record),
            links=links[: self._max_links],
            start_time=start,
            end_time=end,
            instrumentation_scope=self._scope,
        )
        for processor in self._processors:
            processor.on_end(span)


def _times(record: StepRecord) -> tuple[int, int]:
    offset = time.time_ns() - time.monotonic_ns()
    return int(record.planned * 1e9) + offset, int(record.published * 1e9) + offset


def _attributes(record: StepRecord) -> dict[str, Any]:
    return {
        "slipstream.step.id": record.step_id,
        "slipstream.step.rows": record.num_rows,
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
    }
