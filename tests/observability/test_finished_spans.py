"""A span is the same whether the SDK makes it or we do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from src.core.config import ObservabilitySection
from src.observability.tracing import providers
from src.observability.tracing.finished_spans import DirectSpans, FinishedSpans, TracerSpans
from src.observability.tracing.sampling import FastSampling
from src.observability.tracing.settings import SamplerSettings, read_settings
from src.observability.tracing.spans import MAX_LINKS, SpanWriter
from tests.observability.test_trace_events import make_step

RECORD = make_step(7, 100.0, num_rows=3, preemptions=1)
LINKS = [
    Link(SpanContext(1000 + number, 10 + number, bool(number % 2), TraceFlags(1)))
    for number in range(3)
]
PARENT = SpanContext(77, 7, True, TraceFlags(1), TraceState([("vendor", "x")]))
UNSAMPLED = SpanContext(77, 7, True, TraceFlags(0))


def error() -> Exception:
    try:
        raise ValueError("no such thing")
    except ValueError as caught:
        return caught


def below(parent: SpanContext) -> Context:
    return set_span_in_context(NonRecordingSpan(parent))


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def ours(exporter: InMemorySpanExporter, ratio: float = 1.0) -> DirectSpans:
    return DirectSpans(
        FastSampling(SamplerSettings(ratio, True)),
        Resource({"service.name": "x"}),
        InstrumentationScope("slipstream", "1.2"),
        [SimpleSpanProcessor(exporter)],
    )


def theirs(exporter: InMemorySpanExporter) -> TracerSpans:
    provider = TracerProvider(resource=Resource({"service.name": "x"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return TracerSpans(provider.get_tracer("slipstream", "1.2"))


def told(span: ReadableSpan) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(span.to_json())
    # Ids are drawn.
    if span.parent is None:
        told["context"].pop("trace_id")
    told["context"].pop("span_id")
    return told


@pytest.mark.parametrize(
    "write",
    [
        lambda spans: spans.write("plain", None, 5, 9),
        lambda spans: spans.write("child", below(PARENT), 5, 9, {"a": 1, "b": "c", "d": [1.5]}),
        lambda spans: spans.write("told", below(PARENT), 5, 9, events=[(6, "one"), (7, "two")]),
        lambda spans: spans.write("busy", None, 5, 9, events=[(i, "x") for i in range(150)]),
        lambda spans: spans.write("linked", None, 5, 9, links=LINKS),
        lambda spans: spans.write("failed", below(PARENT), 5, 9, error=error()),
    ],
)
def test_both_ways_lead_to_the_same_span(
    exporter: InMemorySpanExporter, write: Callable[[FinishedSpans], SpanContext]
) -> None:
    spans = []
    for way in (ours(exporter), theirs(exporter)):
        identity = write(way)
        (span,) = exporter.get_finished_spans()
        assert span.get_span_context() == identity
        assert identity.is_valid
        assert identity.trace_flags.sampled
        assert (span.start_time, span.end_time) == (5, 9)
        spans.append(span)
        exporter.clear()
    assert told(spans[0]) == told(spans[1])
    assert [link.context for link in spans[0].links] == [link.context for link in spans[1].links]


def test_a_child_of_what_is_not_sampled_is_not_written(exporter: InMemorySpanExporter) -> None:
    for way in (ours(exporter), theirs(exporter)):
        assert not way.write("child", below(UNSAMPLED), 5, 9).trace_flags.sampled
    assert not exporter.get_finished_spans()


def test_the_sampler_s_share_of_new_traces_is_written(exporter: InMemorySpanExporter) -> None:
    none, some = ours(exporter, 0.0), ours(exporter, 0.3)
    for _ in range(500):
        none.write("step", None, 5, 9)
    assert not exporter.get_finished_spans()
    for _ in range(500):
        some.write("step", None, 5, 9)
    spans = exporter.get_finished_spans()
    # Ten standard deviations around 150.
    assert 50 < len(spans) < 250
    sampler = FastSampling(SamplerSettings(0.3, True)).sampler
    for span in spans:
        identity = span.get_span_context()
        assert sampler.should_sample(None, identity.trace_id, "step").decision.is_sampled()
    assert len({span.get_span_context().trace_id for span in spans}) == len(spans)


def test_a_step_is_linked_to_so_many_requests(exporter: InMemorySpanExporter) -> None:
    SpanWriter(ours(exporter)).step(RECORD, LINKS * 40)
    (span,) = exporter.get_finished_spans()
    assert [link.context for link in span.links] == [
        link.context for link in (LINKS * 40)[:MAX_LINKS]
    ]
    assert len(span.links) == 32
    assert span.attributes is not None
    assert span.attributes["slipstream.step.traced_requests"] == len(LINKS) * 40


@pytest.mark.parametrize(
    ("variables", "kind"),
    [({}, DirectSpans), ({"OTEL_SPAN_LINK_COUNT_LIMIT": "2"}, TracerSpans)],
)
def test_limits_that_somebody_sets_are_the_sdk_s_to_apply(
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    kind: type[FinishedSpans],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(providers, "span_exporters", lambda settings: [exporter])
    section = ObservabilitySection()
    opened = providers.open_providers(
        read_settings(section, {"OTEL_TRACES_EXPORTER": "console"}), section, "tiny", "1.2"
    )
    assert opened.writer is not None
    assert type(opened.writer._spans) is kind
    opened.writer.step(RECORD, LINKS)
    opened.close()
    (span,) = exporter.get_finished_spans()
    assert len(span.links) == (2 if variables else 3)
    assert span.resource.attributes["slipstream.model"] == "tiny"
