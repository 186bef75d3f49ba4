"""Tasks that run while an engine is open: heartbeat, watchdog and periodic log line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from src.core.config import ObservabilitySection
from src.core.status import EngineStats, EngineStatus
from src.engine.telemetry.health import Heartbeat, Progress, Watchdog
from src.engine.telemetry.stats_line import StatsLine
from src.observability.metrics import EngineMetrics


class BackgroundTasks:
    """Starts and stops the tasks with their engine, on its event loop."""

    def __init__(
        self,
        section: ObservabilitySection,
        metrics: EngineMetrics,
        progress: Progress,
        read_status: Callable[[], EngineStatus],
        read_stats: Callable[[], EngineStats],
    ) -> None:
        self._metrics = metrics
        self._read_status = read_status
        self._read_stats = read_stats
        self._stats_interval = section.stats_interval
        self._heartbeat = Heartbeat(metrics.on_loop_lag)
        self._watchdog: Watchdog | None = None
        if section.stall_seconds:
            self._watchdog = Watchdog(progress, self._heartbeat, section.stall_seconds)
        self._stats_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the tasks on the running event loop."""
        self._heartbeat.start()
        if self._watchdog is not None:
            self._watchdog.start()
        if self._stats_interval:
            self._stats_task = asyncio.create_task(self._log_stats(), name="slipstream-stats")

    def stop(self) -> None:
        """Stop the tasks."""
        self._heartbeat.stop()
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._stats_task is not None:
            self._stats_task.cancel()

    async def _log_stats(self) -> None:
        line = StatsLine(self._metrics)
        while True:
            await asyncio.sleep(self._stats_interval)
            if self._read_status().healthy:
                line.write(self._read_stats())
