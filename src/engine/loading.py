"""Hands an engine's parts from the thread that builds them to the event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from src.core.collector import paused_collector
from src.core.config import Config
from src.core.start_timeline import StartTimeline
from src.observability.metrics import ModelFacts, Readings

if TYPE_CHECKING:
    from src.engine.loop import EngineLoop
    from src.engine.startup import EngineParts, Report


class Loaded(NamedTuple):
    """The built parts, and the functions and classes by which the event loop uses them."""

    parts: EngineParts
    loop_class: type[EngineLoop]
    facts: ModelFacts
    # Called with the parts, and the seconds for which work has waited without progress.
    read: Callable[[EngineParts, float], Readings]


class Loading:
    """Builds one engine in a thread. A thread cannot be cancelled, and may outlive the event loop.

    So a caller that stops waiting calls `abandon`, and the thread itself closes the parts that it
    builds later. ``_lock`` decides which of the two came first.

    Parameters
    ----------
    report, timeline
        See `build_engine`.
    """

    def __init__(self, config: Config, report: Report, timeline: StartTimeline) -> None:
        self._config = config
        self._report = report
        self._timeline = timeline
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._parts: EngineParts | None = None

    def run(self) -> Loaded | None:
        """Build the parts; ``None`` if it was abandoned, and the parts are closed. Blocks.

        Raises
        ------
        ModelLoadError, ConfigError
            With one readable reason.
        """
        # Imported here because these load torch, which takes seconds.
        with paused_collector():
            from src.engine.loop import EngineLoop
            from src.engine.startup import build_engine
            from src.engine.telemetry.readings import model_facts, read_engine

        parts = build_engine(self._config, self._report, self._timeline)
        with self._lock:
            if not self._is_abandoned:
                self._parts = parts
                return Loaded(parts, EngineLoop, model_facts(self._config, parts), read_engine)
        parts.close()
        return None

    def abandon(self) -> EngineParts | None:
        """Stop waiting for `run`. Returns parts that are already built; the caller closes them."""
        with self._lock:
            self._is_abandoned = True
            return self._parts
