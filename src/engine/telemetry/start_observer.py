"""Reports an engine's start: a table in the log, a trace, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from src.core.memory_report import memory_lines
from src.core.start_timeline import StartSpan, StartTimeline, timeline_lines
from src.observability.logs import log_lines
from src.observability.metrics import EngineMetrics
from src.observability.tracing import Telemetry

if TYPE_CHECKING:
    from src.engine.startup import EngineParts

logger = logging.getLogger(__name__)


class StartObserver:
    """Follows one start, including parts that go on after the engine is ready.

    Call all methods on the engine's event loop. Any thread may use ``timeline``.
    """

    def __init__(self, metrics: EngineMetrics, telemetry: Telemetry) -> None:
        self.timeline = StartTimeline(self._ended)
        self._metrics = metrics
        self._telemetry = telemetry
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._is_over = False

    def begin(self) -> None:
        """The first phase begins."""
        self._event_loop = asyncio.get_running_loop()
        self.timeline.phase("importing")

    def ready(self, parts: EngineParts) -> None:
        """The engine is ready and admits requests."""
        spans, ended = self._finish(None)
        began = self.timeline.began
        rows = [span.since(began) for span in [*spans, StartSpan("ready", ended, ended)]]
        # Ended parts are reported already, or will be in the event loop's next turn.
        for row in rows:
            if row.ended is None or row.name == "ready":
                self._metrics.on_startup_phase(row.name, row.began, None)
        info = parts.info
        log_lines(
            logger,
            logging.INFO,
            f"{info.name} ready in {ended - began:.1f} s: {info.device_type}, {info.dtype}, "
            f"attention {parts.attention}, context {info.max_model_len} tokens",
            "\n".join(timeline_lines(rows)),
        )
        log_lines(logger, logging.INFO, "where memory goes", "\n".join(memory_lines(parts.memory)))

    def failed(self, error: BaseException) -> None:
        """The start, or the engine later, has failed."""
        if not self._is_over:
            self._finish(error)

    def _finish(self, error: BaseException | None) -> tuple[list[StartSpan], float]:
        self._is_over = True
        spans, ended = self.timeline.finish(error)
        self._telemetry.startup(spans, ended, error)
        return spans, ended

    def _ended(self, span: StartSpan, is_late: bool) -> None:
        """Called by the timeline in any thread."""
        assert self._event_loop is not None
        # Raised if the event loop is closed; then there is nothing to report.
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(self._tell, span, is_late)

    def _tell(self, span: StartSpan, is_late: bool) -> None:
        assert span.ended is not None
        began = span.began - self.timeline.began
        self._metrics.on_startup_phase(span.name, began, span.ended - span.began)
        if is_late:
            self._telemetry.startup_went_on(span)
