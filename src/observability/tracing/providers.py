"""Opens the SDK's parts: our own, as the variables ask, or those of the embedding program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import context as otel_context
from opentelemetry import metrics as otel_metrics
from opentelemetry import propagate
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Span, SpanKind, Tracer, set_span_in_context

from src.core.config import ObservabilitySection
from src.observability.tracing.exporters import (
    Complaints,
    GuardedSpanExporter,
    metric_exporters,
    quiet_exporters,
    span_exporters,
)
from src.observability.tracing.finished_spans import DirectSpans, TracerSpans
from src.observability.tracing.gen_ai_metrics import GenAIMetrics
from src.observability.tracing.sampling import FastSampling
from src.observability.tracing.settings import TelemetrySettings
from src.observability.tracing.spans import SpanWriter

SCOPE = "slipstream"


@dataclass
class Providers:
    """The parts of the SDK that are open.

    Attributes
    ----------
    fields
        Names of the headers that carry a caller's context.
    sampling
        The fast path of our own sampler; ``None`` with an embedding program's provider.
    own_tracers, own_meters
        Our own providers, which we shut down at the end; others' are left alone.
    """

    tracer: Tracer | None = None
    writer: SpanWriter | None = None
    metrics: GenAIMetrics | None = None
    fields: frozenset[bytes] = frozenset()
    sampling: FastSampling | None = None
    own_tracers: TracerProvider | None = None
    own_meters: MeterProvider | None = None

    def start(
        self, name: str, carrier: Mapping[bytes, bytes], start_time: int, *, server: bool
    ) -> tuple[Span, Context] | None:
        """Start a request's span; ``None`` if the provider's sampler drops it."""
        assert self.tracer is not None
        # A span that is already open, e.g. by an instrumentation, has read the headers itself.
        context = otel_context.get_current()
        if carrier and not otel_trace.get_current_span(context).get_span_context().is_valid:
            text = {
                key.decode("latin-1"): value.decode("latin-1") for key, value in carrier.items()
            }
            context = propagate.extract(text, context)
        span = self.tracer.start_span(
            name,
            context,
            kind=SpanKind.SERVER if server else SpanKind.INTERNAL,
            start_time=start_time,
        )
        if not span.get_span_context().trace_flags.sampled:
            return None
        return span, set_span_in_context(span, context)

    def close(self) -> None:
        """Export the rest and shut down our own providers."""
        if self.own_tracers is not None:
            self.own_tracers.shutdown()
        if self.own_meters is not None:
            self.own_meters.shutdown()


def open_providers(
    settings: TelemetrySettings, section: ObservabilitySection, model: str, version: str
) -> Providers:
    """Set up what the settings ask for; log one line for each part that cannot be set up."""
    providers = Providers()
    resource = Resource.create()
    defaults = {SERVICE_VERSION: version, "slipstream.model": model}
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        defaults[SERVICE_NAME] = "slipstream"
    resource = resource.merge(Resource(defaults)) if settings.enabled else resource
    if settings.embedded:
        providers.tracer = otel_trace.get_tracer(SCOPE, version)
        providers.writer = SpanWriter(TracerSpans(providers.tracer), section.trace_token_events)
    elif exporters := span_exporters(settings):
        sampling = providers.sampling = FastSampling(settings.sampler)
        processors = span_processors(exporters)
        providers.own_tracers = tracer_provider(resource, sampling, processors)
        providers.tracer = providers.own_tracers.get_tracer(SCOPE, version)
        scope = InstrumentationScope(SCOPE, version)
        spans = (
            TracerSpans(providers.tracer)
            if _has_limits()
            else DirectSpans(sampling, resource, scope, processors)
        )
        providers.writer = SpanWriter(spans, section.trace_token_events)
    if providers.tracer is not None:
        providers.fields = frozenset(
            name.lower().encode() for name in propagate.get_global_textmap().fields
        )
        if b"traceparent" not in providers.fields:
            # Another propagation format: only its propagator can read a caller's decision.
            providers.sampling = None
    if readers := [PeriodicExportingMetricReader(each) for each in metric_exporters(settings)]:
        quiet_exporters()
        providers.own_meters = MeterProvider(readers, resource, shutdown_on_exit=False)
        providers.metrics = GenAIMetrics(providers.own_meters.get_meter(SCOPE, version), model)
    elif isinstance(otel_metrics.get_meter_provider(), MeterProvider):
        providers.metrics = GenAIMetrics(otel_metrics.get_meter(SCOPE, version), model)
    return providers


def _has_limits() -> bool:
    """Whether variables set other span limits; the SDK applies those, our fast path does not."""
    return any(name.startswith("OTEL_") and name.endswith("_LIMIT") for name in os.environ)


def span_processors(exporters: Sequence[SpanExporter]) -> list[SpanProcessor]:
    """A batch processor per exporter; ``OTEL_BSP_...`` bounds its queue."""
    quiet_exporters()
    complaints = Complaints()
    return [BatchSpanProcessor(GuardedSpanExporter(each, complaints)) for each in exporters]


def tracer_provider(
    resource: Resource, sampling: FastSampling, processors: Sequence[SpanProcessor]
) -> TracerProvider:
    """The SDK's provider, with our decision on what is sampled."""
    provider = TracerProvider(
        sampler=sampling.sampler,
        resource=resource,
        shutdown_on_exit=False,
        id_generator=sampling.ids,
    )
    for processor in processors:
        provider.add_span_processor(processor)
    return provider
