"""`Telemetry`: the engine's only interface to traces and OTLP metrics; free when disabled.

Importing this module does not import OpenTelemetry; `Telemetry.open` does, if it is enabled.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from src.core.config import ObservabilitySection
from src.core.records import RequestRecord
from src.core.start_timeline import StartSpan
from src.core.steps import StepRecord
from src.observability.tracing.background import Background
from src.observability.tracing.request import RequestTrace
from src.observability.tracing.settings import TelemetrySettings, read_settings

if TYPE_CHECKING:
    from src.observability.tracing.gen_ai_metrics import GenAIMetrics
    from src.observability.tracing.providers import Providers

logger = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]

# Seconds that an ending process waits for the collector.
CLOSE_TIMEOUT: Final = 3.0


class Telemetry:
    """Traces of requests, steps and the start, and the metrics of the GenAI conventions.

    Parameters
    ----------
    section
        The settings, which complement the ``OTEL_...`` variables.
    model, version
        Reported in the resource and the spans.
    """

    def __init__(self, section: ObservabilitySection, model: str, version: str) -> None:
        self._section = section
        self._model = model
        self._version = version
        self._settings: TelemetrySettings | None = None
        self._providers: Providers | None = None
        self._background: Background | None = None
        self._metrics: GenAIMetrics | None = None

    @property
    def wanted(self) -> bool:
        """Whether anything is to be exported."""
        if self._settings is None:
            self._settings = read_settings(self._section)
        return self._settings.enabled

    @property
    def traces(self) -> bool:
        """Whether requests may be traced."""
        return self._providers is not None and self._providers.tracer is not None

    @property
    def active(self) -> bool:
        """Whether finished requests must be reported, for traces or for metrics."""
        return self._background is not None

    def open(self) -> None:
        """Import the SDK and start exporting, if enabled; blocks for some 0.3 s."""
        if not self.wanted:
            return
        from src.observability.tracing.providers import open_providers

        assert self._settings is not None
        providers = open_providers(self._settings, self._section, self._model, self._version)
        if providers.tracer is None and providers.metrics is None:
            return
        self._metrics = providers.metrics
        self._background = Background()
        self._providers = providers

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Export the rest; blocks for at most ``timeout`` seconds."""
        providers, self._providers = self._providers, None
        background, self._background = self._background, None
        if providers is None or background is None:
            return
        deadline = time.monotonic() + timeout
        finished = background.close(timeout)
        # Not an executor's thread: if it hangs, the process could not end.
        closing = threading.Thread(target=providers.close, name="slipstream-flush", daemon=True)
        closing.start()
        closing.join(max(0.0, deadline - time.monotonic()))
        if closing.is_alive() or not finished:
            logger.warning("some telemetry was lost: the collector did not take it in time")

    # Requests

    def begin(
        self,
        operation: str,
        headers: Headers = (),
        *,
        received: float,
        server: bool = True,
    ) -> RequestTrace | None:
        """Start the span of a request that came in at ``received``; ``None`` if not sampled.

        Parameters
        ----------
        operation
            ``chat``, ``text_completion``, ``embeddings`` or another task.
        headers
            Of the HTTP request, names in lower case: ``traceparent`` and other propagation headers.
        server
            ``False`` for a request from the embedding program, which has no headers.
        """
        providers = self._providers
        if providers is None or providers.tracer is None:
            return None
        sampling, fields = providers.sampling, providers.fields
        if sampling is not None:
            parent = b""
            for name, value in headers:
                if name == b"traceparent":
                    parent = value
            if not sampling.samples(parent):
                return None
        carrier = {name: value for name, value in headers if name in fields}
        offset = time.time_ns() - time.monotonic_ns()
        start_time = int(received * 1e9) + offset
        span_and_context = providers.start(operation, carrier, start_time, server=server)
        if span_and_context is None:
            return None
        span, context = span_and_context
        identity = span.get_span_context()
        return RequestTrace(
            span=span,
            context=context,
            trace_id=f"{identity.trace_id:032x}",
            span_id=f"{identity.span_id:016x}",
            operation=operation,
            model=self._model,
            received=received,
            epoch_offset=offset,
            content_chars=self._section.trace_content_chars,
            token_times=self._section.trace_token_events > 0,
        )

    def end(self, trace: RequestTrace) -> None:
        """Call when the request has ended; its spans are built in the background."""
        trace.ended = time.monotonic()
        background, providers = self._background, self._providers
        if background is not None and providers is not None and providers.writer is not None:
            writer = providers.writer
            background.put(lambda: writer.request(trace))

    def prompt_ended(
        self,
        operation: str,
        arrival: float,
        records: list[RequestRecord],
        error: BaseException | None,
    ) -> None:
        """Report one served or refused prompt to the metrics, sampled or not."""
        metrics, background = self._metrics, self._background
        if metrics is None or background is None:
            return
        seconds = time.monotonic() - arrival
        background.put(lambda: metrics.ended(operation, seconds, records, error))

    # Steps and the start

    def samples_step(self) -> bool:
        """Whether the step that is being committed gets a span."""
        ratio = self._section.trace_steps
        return self.traces and ratio > 0 and (ratio >= 1 or random.random() < ratio)

    def step(self, record: StepRecord, served: Sequence[RequestTrace]) -> None:
        """Report a finished step; ``served`` are the sampled requests that it computed for."""
        background, providers = self._background, self._providers
        if background is None or providers is None or providers.writer is None:
            return
        writer = providers.writer
        background.put(lambda: writer.step(record, [trace.link for trace in served]))

    def startup(
        self, spans: Sequence[StartSpan], ended: float, error: BaseException | None
    ) -> None:
        """Report that the start has finished, or failed with ``error``; call it once."""
        background, providers = self._background, self._providers
        if background is None or providers is None or providers.writer is None:
            return
        writer = providers.writer
        background.put(lambda: writer.startup(spans, ended, error))

    def startup_went_on(self, span: StartSpan) -> None:
        """Report a part of the start that ended after the start itself."""
        background, providers = self._background, self._providers
        if background is None or providers is None or providers.writer is None:
            return
        writer = providers.writer
        background.put(lambda: writer.startup_went_on(span))
