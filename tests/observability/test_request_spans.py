"""From what happened to a completion to its spans: who only waits, is cancelled or preempted."""

from __future__ import annotations

import time
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from src.core.config import ObservabilitySection
from src.core.errors import EngineDeadError
from src.core.outputs import FinishReason
from src.core.records import ChunkRecord, RequestRecord
from src.core.sampling_params import SamplingParams
from src.observability.tracing import Telemetry, providers
from src.observability.tracing.request import CompletionTrace, PromptTrace

SECTION = ObservabilitySection()


class Writer:
    """Spans of one request, in seconds since it came in."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._exporter = InMemorySpanExporter()
        patch.setenv("OTEL_TRACES_EXPORTER", "console")
        patch.setattr(providers, "span_exporters", lambda settings: [self._exporter])
        self._telemetry = Telemetry(SECTION, "tiny", "1")
        self._telemetry.open()
        self.zero = time.monotonic() - 100.0

    def record(self, **fields: Any) -> RequestRecord:
        """Of a completion that came at 0 and was queued at 1."""

        def moment(value: Any) -> Any:
            return [self.zero + each for each in value] if isinstance(value, list) else value

        shifted = {
            name: self.zero + value if isinstance(value, float) else moment(value)
            for name, value in fields.items()
        }
        return RequestRecord(arrival=self.zero, queued=self.zero + 1.0, **shifted)

    def chunk(self, begin: float, end: float, start: int = 0) -> ChunkRecord:
        return ChunkRecord(1, start, 8, self.zero + begin, self.zero + end)

    def write(self, *records: RequestRecord) -> dict[str, list[ReadableSpan]]:
        """By name, of a request that ends now."""
        trace = self._telemetry.begin("chat", [], received=self.zero, server=False)
        assert trace is not None
        completions = [CompletionTrace(record, None) for record in records]
        prompt = PromptTrace(self.zero, self.zero + 0.5, 8, 9, SamplingParams(), None, completions)
        trace.prompts.append(prompt)
        self._telemetry.end(trace)
        self.ended = trace.ended - self.zero
        self._telemetry.close(10.0)
        found: dict[str, list[ReadableSpan]] = {}
        for span in sorted(self._exporter.get_finished_spans(), key=lambda s: s.start_time or 0):
            found.setdefault(span.name, []).append(span)
        (self._root,) = found.pop("chat tiny")
        return found

    @property
    def root(self) -> ReadableSpan:
        return self._root

    def times(self, span: ReadableSpan) -> tuple[float, float]:
        assert span.start_time is not None
        assert span.end_time is not None
        assert self._root.start_time is not None
        begin = (span.start_time - self._root.start_time) / 1e9
        return pytest.approx((begin, (span.end_time - self._root.start_time) / 1e9), abs=1e-5)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Writer:
    return Writer(monkeypatch)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.DEADLINE])
def test_who_ends_while_it_waits_has_waited_until_then(
    writer: Writer, reason: FinishReason
) -> None:
    record = writer.record(ended=5.0)
    record.finish_reason = reason
    spans = writer.write(record)
    assert spans.keys() == {"parse and tokenize", "admission", "queue"}
    (queue,) = spans["queue"]
    assert writer.times(queue) == (1.0, 5.0)
    assert (queue.attributes or {})["slipstream.queue.preemptions"] == 0
    assert (writer.root.attributes or {})["gen_ai.response.finish_reasons"] == (reason.value,)
    assert "gen_ai.latency.time_in_queue" not in (writer.root.attributes or {})
    assert writer.root.status.status_code is StatusCode.UNSET


def test_who_waits_when_its_request_ends_has_waited_until_then(writer: Writer) -> None:
    """Nobody has said that the completion has ended: its task was cancelled just before."""
    spans = writer.write(writer.record())
    assert writer.times(spans["queue"][0]) == (1.0, writer.ended)
    assert (writer.root.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)


def test_who_is_cancelled_within_its_prompt_has_no_decode(writer: Writer) -> None:
    record = writer.record(admitted=[2.0], ended=5.0)
    record.chunks = [writer.chunk(2.5, 3.0), writer.chunk(3.0, 3.5, 8)]
    record.finish_reason = FinishReason.ABORT
    spans = writer.write(record)
    assert spans.keys() == {"parse and tokenize", "admission", "queue", "prefill"}
    assert writer.times(spans["queue"][0]) == (1.0, 2.0)
    assert [writer.times(span) for span in spans["prefill"]] == [(2.5, 3.0), (3.0, 3.5)]


def test_who_is_cancelled_while_it_decodes_has_done_so_until_its_last_token(
    writer: Writer,
) -> None:
    record = writer.record(admitted=[2.0], first_token=3.0, last_token=4.0, ended=5.0)
    record.chunks, record.num_tokens = [writer.chunk(2.0, 3.0)], 7
    record.finish_reason = FinishReason.ABORT
    spans = writer.write(record)
    (decode,) = spans["decode"]
    assert writer.times(decode) == (3.0, 4.0)
    assert (decode.attributes or {})["gen_ai.usage.output_tokens"] == 7
    assert [event.name for event in decode.events] == ["first token"]
    assert writer.times(spans["detokenize and stream"][0]) == (3.0, writer.ended)


def test_who_is_preempted_and_ends_while_it_waits_has_waited_twice(writer: Writer) -> None:
    record = writer.record(
        admitted=[2.0], preempted=[4.5], first_token=3.0, last_token=4.0, ended=6.0
    )
    record.chunks = [writer.chunk(2.0, 3.0)]
    spans = writer.write(record)
    assert [writer.times(span) for span in spans["queue"]] == [(1.0, 2.0), (4.5, 6.0)]
    (decode,) = spans["decode"]
    # Its last event is part of it.
    assert writer.times(decode) == (3.0, 4.5)
    assert [event.name for event in decode.events] == ["first token", "preempted"]


def test_what_is_computed_again_is_told_from_what_was_computed_first(writer: Writer) -> None:
    record = writer.record(
        admitted=[2.0, 5.0], preempted=[4.0], first_token=7.0, last_token=8.0, ended=8.0
    )
    record.chunks = [writer.chunk(2.0, 3.0), writer.chunk(5.0, 6.0)]
    record.cached_tokens = 16
    spans = writer.write(record)
    told = [span.attributes or {} for span in spans["prefill"]]
    assert [each["slipstream.prefill.recomputed"] for each in told] == [False, True]
    assert [each["slipstream.prefill.cached_tokens"] for each in told] == [16, 0]
    # Before its first token, so it is no part of decoding.
    assert [event.name for event in writer.root.events] == ["preempted", "resumed"]
    assert [event.name for event in spans["decode"][0].events] == ["first token"]


def test_one_of_several_may_fail_or_wait_for_ever(writer: Writer) -> None:
    failed = writer.record(admitted=[2.0], ended=3.0)
    failed.finish_reason, failed.error = FinishReason.ERROR, EngineDeadError("gone")
    waiting = writer.record(ended=4.0)
    waiting.finish_reason = FinishReason.ABORT
    spans = writer.write(failed, waiting)
    (first,), (second,) = spans["completion 0"], spans["completion 1"]
    assert writer.times(first) == (1.0, 3.0)
    assert first.status.status_code is StatusCode.ERROR
    assert writer.times(second) == (1.0, 4.0)
    assert second.status.status_code is StatusCode.UNSET
    queues = sorted((span.end_time or 0, span.parent) for span in spans["queue"])
    assert [parent and parent.span_id for _, parent in queues] == [
        span.get_span_context().span_id for span in (first, second)
    ]
