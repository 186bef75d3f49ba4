"""A step's span is the same whether the SDK makes it or we do."""

from __future__ import annotations

import json

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags

from src.observability.tracing.sampling import FastSampling
from src.observability.tracing.settings import SamplerSettings
from src.observability.tracing.step_spans import MAX_LINKS, DirectStepSpans, TracerStepSpans
from tests.observability.test_trace_events import make_step

RECORD = make_step(7, 100.0, num_rows=3, preemptions=1)
LINKS = [
    Link(SpanContext(1000 + number, 10 + number, bool(number % 2), TraceFlags(1)))
    for number in range(3)
]


def written(
    exporter: InMemorySpanExporter, ratio: float, links: list[Link], count: int = 1
) -> list[ReadableSpan]:
    processor = SimpleSpanProcessor(exporter)
    direct = DirectStepSpans(
        FastSampling(SamplerSettings(ratio, True)),
        Resource({"service.name": "x"}),
        InstrumentationScope("slipstream", "1.2"),
        [processor],
    )
    for _ in range(count):
        direct.write(RECORD, links)
    return list(exporter.get_finished_spans())


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def test_both_ways_lead_to_the_same_span(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 5_000_000_000)
    monkeypatch.setattr("time.monotonic_ns", lambda: 1_000_000_000)
    (direct,) = written(exporter, 1.0, LINKS)
    exporter.clear()
    provider = TracerProvider(resource=Resource({"service.name": "x"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    TracerStepSpans(provider.get_tracer("slipstream", "1.2")).write(RECORD, LINKS)
    (theirs,) = exporter.get_finished_spans()

    def told(span: ReadableSpan) -> dict[str, object]:
        told: dict[str, object] = json.loads(span.to_json())
        # Ids are drawn.
        assert told.pop("context")
        return told

    assert told(direct) == told(theirs)
    assert direct.start_time == 104_000_000_000
    assert [link.context for link in direct.links] == [link.context for link in LINKS]
    assert direct.get_span_context().is_valid
    assert direct.get_span_context().trace_flags.sampled


def test_links_are_bounded(exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    (span,) = written(exporter, 1.0, LINKS * 40)
    assert len(span.links) == MAX_LINKS
    exporter.clear()
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "2")
    (span,) = written(exporter, 1.0, LINKS)
    assert len(span.links) == 2


def test_the_sampler_s_share_of_steps_is_written(exporter: InMemorySpanExporter) -> None:
    assert not written(exporter, 0.0, LINKS)
    # Ten standard deviations around 150.
    spans = written(exporter, 0.3, LINKS, count=500)
    assert 50 < len(spans) < 250
    sampler = FastSampling(SamplerSettings(0.3, True)).sampler
    for span in spans:
        identity = span.get_span_context()
        assert sampler.should_sample(None, identity.trace_id, "step").decision.is_sampled()
    assert len({span.get_span_context().trace_id for span in spans}) == len(spans)
