"""OTLP's encoding of spans with the same links over and over: each link is encoded once.

A step's span is linked to all the requests that it served, so that a request's link is exported
with every one of its tokens. The exporters' encoder takes some 10 microseconds for a link, 650 for
such a span; putting in what was encoded before takes 110. What is sent is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link

# `ExportTraceServiceRequest` of `opentelemetry.proto`, which has no types.
EncodedSpans = Any
Encoder = Callable[[Sequence[ReadableSpan]], EncodedSpans]


class RepeatedLink(Link):
    """A link that many spans have.

    Attributes
    ----------
    encoded
        The field ``links`` of a span with this link alone, in protobuf's wire format; empty until
        it is first exported.
    """

    encoded: bytes = b""


def use_repeated_links(exporter: ModuleType) -> None:
    """Let the exporters of this module of the OTLP package encode repeated links once.

    They have no parameter for their encoder, which is a name of their module. Where a later version
    of theirs has another, nothing changes but the cost.
    """
    encoder = getattr(exporter, "encode_spans", None)
    if encoder is not None and not isinstance(encoder, _RepeatedLinks):
        exporter.encode_spans = _RepeatedLinks(encoder)  # type: ignore[attr-defined]


class _RepeatedLinks:
    """The library's encoder, which is spared the repeated links."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def __call__(self, spans: Sequence[ReadableSpan]) -> EncodedSpans:
        spared = [_without_links(span) if _is_spared(span) else span for span in spans]
        links = {
            _span_id(before): cast(Sequence[RepeatedLink], before.links)
            for before, after in zip(spans, spared, strict=True)
            if before is not after
        }
        new = {id(link): link for each in links.values() for link in each if not link.encoded}
        if new:
            self._encode_new(list(new.values()))
        request = self._encoder(spared)
        for span in _encoded_spans(request) if links else ():
            if span.span_id in links:
                # Fields of a message may be in pieces, and those of a list add up:
                # https://protobuf.dev/programming-guides/encoding/#last-one-wins
                span.MergeFromString(b"".join([link.encoded for link in links[span.span_id]]))
        return request

    def _encode_new(self, links: Sequence[RepeatedLink]) -> None:
        from opentelemetry.proto.trace.v1.trace_pb2 import Span

        carrier = ReadableSpan(
            "links",
            links[0].context,
            # Looking for one of its own takes milliseconds.
            resource=Resource.get_empty(),
            links=links,
            start_time=0,
            end_time=0,
        )
        (span,) = _encoded_spans(self._encoder([carrier]))
        for link, message in zip(links, span.links, strict=True):
            link.encoded = Span(links=[message]).SerializeToString()


def _is_spared(span: ReadableSpan) -> bool:
    return set(map(type, span.links)) == {RepeatedLink}


def _without_links(span: ReadableSpan) -> ReadableSpan:
    return ReadableSpan(
        span.name,
        span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _span_id(span: ReadableSpan) -> bytes:
    assert span.context is not None
    identity: int = span.context.span_id
    return identity.to_bytes(8, "big")


def _encoded_spans(request: EncodedSpans) -> list[Any]:
    return [
        span
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
