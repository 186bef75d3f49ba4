"""What is exported is the library's encoding, whoever has encoded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from src.observability.tracing.finished_spans import RepeatedLink
from src.observability.tracing.otlp import ExportRequest, SpanEncoder, use_our_encoder

RESOURCE = Resource({"service.name": "a", "numbers": [1, 2]}, "https://schema")
SCOPE = InstrumentationScope("slipstream", "1")
STATES = st.sampled_from([None, TraceState([("vendor", "x"), ("other", "y=z")])])
CONTEXTS = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.sampled_from([TraceFlags(0), TraceFlags(1)]),
    STATES,
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = TEXTS | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
VALUES = SCALARS | st.lists(TEXTS, max_size=3) | st.tuples(st.integers(0, 9), st.integers(0, 9))
ATTRIBUTES = st.dictionaries(TEXTS, VALUES, max_size=4)
EVENTS = st.builds(Event, TEXTS, ATTRIBUTES, st.integers(0, 2**63))
STATUSES = st.one_of(
    st.just(Status()),
    st.just(Status(StatusCode.OK)),
    st.builds(Status, st.just(StatusCode.ERROR), TEXTS),
)


class Library:
    """The library's encoder, and how many spans and links it was asked to encode."""

    def __init__(self) -> None:
        self.spans = 0
        self.links = 0

    def __call__(self, spans: Sequence[ReadableSpan]) -> ExportRequest:
        self.spans += len(spans)
        self.links += sum(len(span.links) for span in spans)
        return encode_spans(spans)


def make_span(context: SpanContext, **fields: Any) -> ReadableSpan:
    given = {"resource": RESOURCE, "instrumentation_scope": SCOPE, "start_time": 1, "end_time": 2}
    return ReadableSpan("step", context, **(given | fields))


@st.composite
def batches(draw: st.DrawFn) -> list[ReadableSpan]:
    """Spans of all kinds, with links out of a few, some of them given twice."""
    repeated: list[Link] = [RepeatedLink(each) for each in draw(st.lists(CONTEXTS, max_size=4))]
    plain = draw(st.lists(st.builds(Link, CONTEXTS, ATTRIBUTES), max_size=2))
    kinds = [kind for kind in (repeated, plain, repeated + plain) if kind]
    return [
        ReadableSpan(
            draw(TEXTS),
            context,
            parent=draw(st.none() | CONTEXTS),
            resource=RESOURCE,
            attributes=draw(st.none() | ATTRIBUTES),
            events=draw(st.lists(EVENTS, max_size=2)),
            links=draw(st.lists(st.sampled_from(draw(st.sampled_from(kinds))), max_size=6))
            if kinds
            else (),
            kind=draw(st.sampled_from(SpanKind)),
            status=draw(STATUSES),
            start_time=draw(st.integers(0, 2**63)),
            end_time=draw(st.integers(0, 2**63)),
            instrumentation_scope=draw(
                st.sampled_from([SCOPE, InstrumentationScope("slipstream", "1")])
            ),
        )
        for context in draw(st.lists(CONTEXTS, min_size=1, max_size=5))
    ]


@given(st.lists(batches(), min_size=1, max_size=2))
def test_the_message_is_the_librarys(given_batches: list[list[ReadableSpan]]) -> None:
    library = Library()
    encoder = SpanEncoder(library)
    for spans in given_batches:
        assert encoder(spans) == encode_spans(spans)
        # Again, now that every link has been encoded before.
        assert encoder(spans) == encode_spans(spans)
        assert encoder(spans).SerializeToString() == encode_spans(spans).SerializeToString()
    # One of each batch, for whose they are.
    assert library.spans == 3 * len(given_batches)


def test_spans_of_the_sdk_are_told_the_same() -> None:
    provider = TracerProvider(resource=RESOURCE, shutdown_on_exit=False)
    tracer = provider.get_tracer("slipstream", "1")
    with tracer.start_as_current_span("above", kind=SpanKind.SERVER) as above:
        above.set_attribute("numbers", [1.5, 2.5])
        above.add_event("now", {"n": 3})
        with tracer.start_as_current_span("below", links=[Link(SpanContext(1, 2, True))]) as below:
            below.record_exception(ValueError("no"))
    spans = [above, below]
    assert SpanEncoder(Library())(spans) == encode_spans(spans)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"attributes": {"huge": 2**70}},
        {"attributes": {"none": None}},
        {"attributes": {"bytes": b"x"}},
        {"attributes": {"map": {"a": 1}}},
        {"resource": Resource({"service.name": "other"})},
        {"instrumentation_scope": InstrumentationScope("other")},
        {"instrumentation_scope": None},
    ],
)
def test_what_ours_never_are_is_left_to_the_library(fields: Mapping[str, Any]) -> None:
    spans = [make_span(SpanContext(1, 2, False)), make_span(SpanContext(3, 4, False), **fields)]
    assert SpanEncoder(Library())(spans) == encode_spans(spans)


def test_a_batch_without_spans_is_the_librarys() -> None:
    assert SpanEncoder(Library())([]) == encode_spans([])


def test_a_link_is_encoded_once_whatever_the_number_of_spans() -> None:
    library = Library()
    encoder = SpanEncoder(library)
    links = [RepeatedLink(SpanContext(1 + n, 2 + n, False)) for n in range(64)]
    for first in range(10, 40, 10):
        spans = [make_span(SpanContext(9, first + n, False), links=links) for n in range(10)]
        encoded = encoder(spans)
        assert [len(span.links) for span in encoded.resource_spans[0].scope_spans[0].spans] == (
            [64] * 10
        )
        # They are there for other exporters, too.
        assert list(spans[0].links) == links
    assert library.links == 3 * 64
    kept = [link.encoded for link in links]
    encoder(spans)
    assert all(one is other.encoded for one, other in zip(kept, links, strict=True))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_installed_exporters_take_it(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their modules still have the encoder under the name by which it is replaced."""
    module: Any = pytest.importorskip(
        f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter"
    )
    monkeypatch.setattr(module, "encode_spans", encode_spans)
    use_our_encoder(module)
    first = module.encode_spans
    assert isinstance(first, SpanEncoder)
    use_our_encoder(module)
    assert module.encode_spans is first
