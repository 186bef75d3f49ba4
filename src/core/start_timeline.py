"""Records when each part of a start began and ended, and shows that as a table.

Most parts follow each other. Some run beside them and end after the engine is ready, for example
background compilation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

_WIDTH: Final = 30


class StartSpan(NamedTuple):
    """One part of a start, or with ``ended == began`` one moment.

    Attributes
    ----------
    began, ended
        Seconds of any one clock. ``ended`` is None while the part goes on.
    error
        The error that it ended with, or None.
    """

    name: str
    began: float
    ended: float | None = None
    error: BaseException | None = None

    def since(self, moment: float) -> StartSpan:
        """The same span with times relative to ``moment``."""
        ended = None if self.ended is None else self.ended - moment
        return self._replace(began=self.began - moment, ended=ended)


def _ignore(span: StartSpan, is_late: bool) -> None:
    pass


class StartTimeline:
    """Records one start, in seconds of ``time.monotonic``. Any thread may call it.

    Parameters
    ----------
    on_ended
        Called with each ended span, and with whether the start was over by then, in the thread
        that ended the span.
    """

    def __init__(self, on_ended: Callable[[StartSpan, bool], None] = _ignore) -> None:
        self._on_ended = on_ended
        self._lock = threading.Lock()
        # In the order of their begin.
        self._spans: dict[str, StartSpan] = {}
        self._phase = ""
        self._is_over = False

    def phase(self, name: str) -> None:
        """Begin a phase and end the previous one. Does nothing if it is the current phase."""
        if name != self._phase:
            now = time.monotonic()
            self._end(self._phase, now, None)
            self._phase = name
            self._begin(name, now)

    def begin(self, name: str) -> None:
        """Begin a part that may run beside phases. Does nothing if it has begun before."""
        self._begin(name, time.monotonic())

    def end(self, name: str, error: BaseException | None = None) -> None:
        """End a part. Does nothing if it has ended before."""
        self._end(name, time.monotonic(), error)

    def finish(self, error: BaseException | None = None) -> tuple[list[StartSpan], float]:
        """End the start and its last phase; returns all spans so far, and the time of the end."""
        now = time.monotonic()
        self._end(self._phase, now, error)
        with self._lock:
            self._is_over = True
            spans = list(self._spans.values())
            # The tracebacks of errors would keep a model alive.
            self._spans = {span.name: span._replace(error=None) for span in spans}
        return spans, now

    @property
    def began(self) -> float:
        """When the first part began; there must be one."""
        return next(iter(self._spans.values())).began

    def _begin(self, name: str, now: float) -> None:
        with self._lock:
            self._spans.setdefault(name, StartSpan(name, now))

    def _end(self, name: str, now: float, error: BaseException | None) -> None:
        with self._lock:
            span = self._spans.get(name)
            if span is None or span.ended is not None:
                return
            span = span._replace(ended=now, error=error)
            is_late = self._is_over
            self._spans[name] = span._replace(error=None) if is_late else span
        self._on_ended(span, is_late)


def timeline_lines(spans: Sequence[StartSpan], width: int = _WIDTH) -> list[str]:
    """Lines of a table: when each part began, how long it took, and a bar on a common scale.

    Parameters
    ----------
    spans
        With times relative to the start's begin; at least one is not 0.
    width
        Width of the scale in characters.
    """
    total = max(max(span.began, span.ended or 0.0) for span in spans)
    longest = max(len(span.name) for span in spans)
    lines = [f"  {'':<{longest}}   began s    took s"]
    for span in spans:
        end = total if span.ended is None else span.ended
        took = f"{end - span.began:.2f}"
        if span.ended is None:
            took = "goes on"
        elif span.ended == span.began:
            took = ""
        # Each bar has at least one character, so that short parts are visible too.
        first = min(width - 1, round(width * span.began / total))
        bar = " " * first + "#" * max(1, round(width * end / total) - first)
        note = "" if span.error is None else f"{'':<{width - len(bar)}}  failed"
        lines.append(f"  {span.name:<{longest}} {span.began:9.2f} {took:>9}  {bar}{note}")
    return lines
