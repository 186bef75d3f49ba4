"""What runs beside an engine for as long as it is open: heartbeat, watchdog, periodic line."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from src.engine.health import Heartbeat, Progress, Watchdog
from src.engine.stats_line import StatsLine

if TYPE_CHECKING:
    from src.engine.client import AsyncEngine


class Companions:
    """Started and stopped with their engine, on its event loop."""

    def __init__(self, engine: AsyncEngine, progress: Progress) -> None:
        section = engine.config.observability
        self._engine = engine
        self._stats_interval = section.stats_interval
        self._heartbeat = Heartbeat(engine.metrics.on_loop_lag)
        self._watchdog: Watchdog | None = None
        if section.stall_seconds:
            self._watchdog = Watchdog(progress, self._heartbeat, section.stall_seconds)
        self._stats_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch, on the running event loop."""
        self._heartbeat.start()
        if self._watchdog is not None:
            self._watchdog.start()
        if self._stats_interval:
            self._stats_task = asyncio.create_task(self._log_stats(), name="slipstream-stats")

    def stop(self) -> None:
        """Watch no more."""
        self._heartbeat.stop()
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._stats_task is not None:
            self._stats_task.cancel()

    async def _log_stats(self) -> None:
        line = StatsLine(self._engine.metrics)
        while True:
            await asyncio.sleep(self._stats_interval)
            if self._engine.status.healthy:
                line.write(self._engine.stats)
