"""The periodic log line with the engine's throughput; none while the engine is idle."""

from __future__ import annotations

import logging
import time

from src.core.status import EngineStats
from src.observability.metrics import EngineMetrics

logger = logging.getLogger(__name__)


class StatsLine:
    """Logs the throughput since the previous line."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._counts = metrics.token_counts
        self._time = time.monotonic()

    def write(self, stats: EngineStats) -> None:
        """Log one line, if there is or was work."""
        now, counts = time.monotonic(), self._metrics.token_counts
        elapsed = max(now - self._time, 1e-9)
        prompt, generation = (
            (count - before) / elapsed for count, before in zip(counts, self._counts, strict=True)
        )
        self._time, self._counts = now, counts
        if not (prompt or generation or stats.num_running or stats.num_waiting):
            return
        queries = stats.prefix_cache_queries
        logger.info(
            "running %d, waiting %d, KV %.1f %%, prefix hits %.1f %%, prompt %.1f tok/s, "
            "generation %.1f tok/s, bubble %.1f %%",
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_usage,
            100 * stats.prefix_cache_hits / queries if queries else 0.0,
            prompt,
            generation,
            100 * self._metrics.bubble,
        )
