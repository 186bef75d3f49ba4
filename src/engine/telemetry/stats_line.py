"""The periodic log line with the engine's throughput; none while the engine is idle."""

from __future__ import annotations

import logging
import time

from src.core.status import EngineStats
from src.engine.scheduling.scheduler import Scheduler
from src.engine.telemetry.timeline import Timeline
from src.observability.metrics import EngineMetrics

logger = logging.getLogger(__name__)


def stats_of(scheduler: Scheduler, timeline: Timeline, *, compiled: bool) -> EngineStats:
    """The figures of this moment."""
    last = timeline.last
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        kv_usage=scheduler.kv_usage,
        num_steps=0 if last is None else last.step_id,
        bubble=timeline.bubble,
        preemptions=scheduler.stats.preemptions,
        prefix_cache_queries=scheduler.stats.prefix_cache_queries,
        prefix_cache_hits=scheduler.stats.prefix_cache_hits,
        pool_is_whole=scheduler.pool_is_whole(),
        compiled=compiled,
    )


class StatsLine:
    """Logs the throughput since the previous line."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._counts = metrics.token_counts
        self._drafts = metrics.draft_counts
        self._time = time.monotonic()

    def write(self, stats: EngineStats) -> None:
        """Log one line, if there is or was work."""
        now, counts = time.monotonic(), self._metrics.token_counts
        elapsed = max(now - self._time, 1e-9)
        prompt, generation = (
            (count - before) / elapsed for count, before in zip(counts, self._counts, strict=True)
        )
        drafts = self._metrics.draft_counts
        drafted, accepted = (
            count - before for count, before in zip(drafts, self._drafts, strict=True)
        )
        self._time, self._counts, self._drafts = now, counts, drafts
        if not (prompt or generation or stats.num_running or stats.num_waiting):
            return
        queries = stats.prefix_cache_queries
        logger.info(
            "running %d, waiting %d, KV %.1f %%, prefix hits %.1f %%, prompt %.1f tok/s, "
            "generation %.1f tok/s, bubble %.1f %%%s",
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_usage,
            100 * stats.prefix_cache_hits / queries if queries else 0.0,
            prompt,
            generation,
            100 * self._metrics.bubble,
            f", drafts accepted {100 * accepted / drafted:.1f} %" if drafted else "",
        )
