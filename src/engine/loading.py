"""An engine's parts, from the thread that builds them to a loop that may not want them any more."""

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
    """What was built, and what the event loop drives and reads it by."""

    parts: EngineParts
    loop_class: type[EngineLoop]
    facts: ModelFacts
    # Of the parts, and seconds for which work has waited.
    read: Callable[[EngineParts, float], Readings]


class Loading:
    """Builds one engine in a thread, which cannot be cancelled and may outlive the event loop.

    So who does not wait for it any more says so, and the thread itself closes what it built. Under
    ``_lock`` one of the two comes first.

    Parameters
    ----------
    report, timeline
        As of `build_engine`.
    """

    def __init__(self, config: Config, report: Report, timeline: StartTimeline) -> None:
        self._config = config
        self._report = report
        self._timeline = timeline
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._parts: EngineParts | None = None

    def run(self) -> Loaded | None:
        """Build; ``None`` if it was abandoned, and nothing is left. Blocks.

        Raises
        ------
        ModelLoadError, ConfigError
            With one readable reason.
        """
        # Here and not at the top: these bring torch in, which takes seconds.
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
        """Take nothing from `run` any more; parts that it has handed over are the caller's."""
        with self._lock:
            self._is_abandoned = True
            return self._parts
