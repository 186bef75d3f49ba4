"""Creates the exporters that the variables ask for, and limits their error messages.

The SDK would print a traceback per failed attempt; here a failing collector costs one log line a
minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter, SpanExportResult

from src.observability.tracing.settings import TelemetrySettings, has_endpoint, protocol_of

logger = logging.getLogger(__name__)

# Seconds between two log lines about a collector that does not answer.
WARNING_INTERVAL: Final = 60.0
# Loggers of the SDK and its exporters.
_NOISY: Final = (
    "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http._common",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.http.transport",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.metrics._internal.export",
)


class Complaints:
    """Log lines about failed exports: at most one per interval, with the losses since the last."""

    def __init__(self, interval: float = WARNING_INTERVAL) -> None:
        self._interval = interval
        self._lock = threading.Lock()
        self._next = 0.0
        self._lost = 0

    def lost(self, what: str, count: int, reason: str) -> None:
        """Report that ``count`` items did not reach the collector."""
        with self._lock:
            self._lost += count
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + self._interval
            lost, self._lost = self._lost, 0
        logger.warning(
            "the telemetry collector does not take %s (%d lost): %s; the next such line comes in "
            "%.0f s at the earliest",
            what,
            lost,
            reason,
            self._interval,
        )


class _Reasons(logging.Filter):
    """Keeps the last message that an exporter would log, and suppresses all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "no answer"

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text} {record.exc_info[1]!r}"
        self.last = " ".join(text.split())[:300]
        return False


_reasons = _Reasons()


def quiet_exporters() -> None:
    """Suppress the exporters' own logging, and use it as the reason in our lines; idempotent."""
    for name in _NOISY:
        logging.getLogger(name).addFilter(_reasons)


class GuardedSpanExporter(SpanExporter):
    """Wraps an exporter so that it never raises; its failures are logged once per interval."""

    def __init__(self, exporter: SpanExporter, complaints: Complaints) -> None:
        self._exporter = exporter
        self._complaints = complaints

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export; a failure is counted and logged."""
        try:
            result = self._exporter.export(spans)
        # Any error of the network or a library only loses these spans.
        except Exception as error:
            _reasons.last = f"{type(error).__name__}: {error}"[:300]
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._complaints.lost("spans", len(spans), _reasons.last)
        return result

    def shutdown(self) -> None:
        """Shut down the wrapped exporter."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the wrapped exporter."""
        return bool(self._exporter.force_flush(timeout_millis))


def span_exporters(settings: TelemetrySettings) -> list[SpanExporter]:
    """The exporters of traces; logs one line for each whose package is not installed."""
    return [
        exporter
        for name in settings.trace_exporters
        if (exporter := ConsoleSpanExporter() if name == "console" else _otlp_spans(settings))
    ]


def metric_exporters(settings: TelemetrySettings) -> list[Any]:
    """The exporters of metrics; logs one line for each whose package is not installed."""
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

    return [
        exporter
        for name in settings.metric_exporters
        if (exporter := ConsoleMetricExporter() if name == "console" else _otlp_metrics(settings))
    ]


def _otlp_spans(settings: TelemetrySettings) -> SpanExporter | None:
    def exporter(protocol: str, **arguments: Any) -> SpanExporter:
        module = import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter")
        exporter: SpanExporter = module.OTLPSpanExporter(**arguments)
        return exporter

    http, grpc = partial(exporter, "http"), partial(exporter, "grpc")
    made: SpanExporter | None = _otlp("TRACES", "v1/traces", settings, http, grpc)
    return made


def _otlp_metrics(settings: TelemetrySettings) -> Any:
    def http(**arguments: Any) -> Any:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter(**arguments)

    def grpc(**arguments: Any) -> Any:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter(**arguments)

    return _otlp("METRICS", "v1/metrics", settings, http, grpc)


def _otlp(
    signal: str,
    path: str,
    settings: TelemetrySettings,
    http: Callable[..., Any],
    grpc: Callable[..., Any],
) -> Any:
    """An OTLP exporter; it reads all settings but the endpoint from the variables itself."""
    protocol = protocol_of(signal)
    endpoint = None if has_endpoint(signal) else settings.endpoint
    arguments: dict[str, Any] = {}
    if endpoint is not None:
        arguments["endpoint"] = endpoint if protocol == "grpc" else f"{endpoint.rstrip('/')}/{path}"
    if protocol not in ("grpc", "http/protobuf"):
        logger.warning(
            "OTEL_EXPORTER_OTLP_PROTOCOL=%s: nothing is exported; http/protobuf and grpc are known",
            protocol,
        )
        return None
    try:
        return grpc(**arguments) if protocol == "grpc" else http(**arguments)
    except ImportError as error:
        logger.warning(
            "%s are to be exported by OTLP over %s, but %s is not installed: "
            "pip install -e '.[otel]' in the checkout",
            signal.lower(),
            protocol,
            error.name,
        )
        return None
