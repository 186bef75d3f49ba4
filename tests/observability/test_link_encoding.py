"""What is exported is the library's encoding, whoever encoded the links."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from src.observability.tracing.encoding import EncodedSpans, RepeatedLink, use_repeated_links

CONTEXTS = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.sampled_from([TraceFlags(0), TraceFlags(1)]),
)
RESOURCES = [Resource({"service.name": name}) for name in "ab"]
SCOPES = [InstrumentationScope("slipstream", version) for version in "12"]


class Exporter:
    """A module of an exporter, and how often its library's encoder saw a link."""

    def __init__(self) -> None:
        self.links_seen = 0
        use_repeated_links(self)  # type: ignore[arg-type]

    def encode_spans(self, spans: list[ReadableSpan]) -> EncodedSpans:
        self.links_seen += sum(len(span.links) for span in spans)
        return encode_spans(spans)


def make_span(
    context: SpanContext, links: list[Link], name: str = "step", number: int = 0
) -> ReadableSpan:
    return ReadableSpan(
        name,
        context,
        parent=SpanContext(5, 6, True) if number % 3 == 1 else None,
        resource=RESOURCES[number % 2],
        attributes={"slipstream.step.id": number, "slipstream.step.plan": 0.25},
        events=[Event("first token", {"n": number}, 17)],
        links=links,
        kind=SpanKind.SERVER if number % 2 else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, "no") if number % 3 == 0 else Status(),
        start_time=100 + number,
        end_time=200 + number,
        instrumentation_scope=SCOPES[number // 2 % 2],
    )


@st.composite
def batches(draw: st.DrawFn) -> list[ReadableSpan]:
    """Spans with ids of their own and links out of a few, some of them given twice."""
    repeated: list[Link] = [RepeatedLink(each) for each in draw(st.lists(CONTEXTS, max_size=4))]
    plain = [Link(each, {"why": "x"}) for each in draw(st.lists(CONTEXTS, max_size=2))]
    kinds = [repeated, plain, repeated + plain]
    identities = draw(
        st.lists(CONTEXTS, unique_by=lambda context: context.span_id, min_size=1, max_size=8)
    )
    return [
        make_span(
            identity,
            draw(st.lists(st.sampled_from(kind), max_size=6))
            if (kind := draw(st.sampled_from(kinds)))
            else [],
            number=number,
        )
        for number, identity in enumerate(identities)
    ]


@given(st.lists(batches(), min_size=1, max_size=3))
def test_the_encoding_is_the_librarys(given_batches: list[list[ReadableSpan]]) -> None:
    exporter = Exporter()
    for spans in given_batches:
        assert exporter.encode_spans(spans) == encode_spans(spans)
        # Again, now that every link has been encoded before.
        again = exporter.encode_spans(spans)
        assert again.SerializeToString() == encode_spans(spans).SerializeToString()


def test_a_link_is_encoded_once_whatever_the_number_of_spans() -> None:
    exporter = Exporter()
    links: list[Link] = [RepeatedLink(SpanContext(1 + n, 2 + n, False)) for n in range(64)]
    for first in range(10, 40, 10):
        spans = [make_span(SpanContext(9, first + n, False), links) for n in range(10)]
        encoded = exporter.encode_spans(spans)
        assert len(encoded.resource_spans[0].scope_spans[0].spans[0].links) == 64
    assert exporter.links_seen == 64


def test_spans_keep_their_links_for_other_exporters() -> None:
    links: list[Link] = [RepeatedLink(SpanContext(1, 2, False))]
    span = make_span(SpanContext(9, 8, False), links)
    Exporter().encode_spans([span])
    assert list(span.links) == links


@pytest.mark.parametrize("module", [http_exporter, grpc_exporter], ids=["http", "grpc"])
def test_the_installed_exporters_take_it(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their modules still have the encoder under the name by which it is replaced."""
    monkeypatch.setattr(module, "encode_spans", encode_spans)
    use_repeated_links(module)  # type: ignore[arg-type]
    first = vars(module)["encode_spans"]
    assert first is not encode_spans
    use_repeated_links(module)  # type: ignore[arg-type]
    assert vars(module)["encode_spans"] is first
