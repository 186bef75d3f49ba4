"""When each part of a start began and ended, and how that is shown as one table.

Most parts follow each other. Some go on beside them, and behind ready: nobody waits for a compiler.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

_WIDTH: Final = 30


class StartSpan(NamedTuple):
    """One part of a start, or with ``ended == began`` a moment of it.

    Attributes
    ----------
    began, ended
        In seconds; of which clock is the caller's affair. ``ended`` is None while it goes on.
    error
        What it ended with.
    """

    name: str
    began: float
    ended: float | None = None
    error: BaseException | None = None

    def since(self, moment: float) -> StartSpan:
        """The same, with times that are counted from this moment."""
        ended = None if self.ended is None else self.ended - moment
        return self._replace(began=self.began - moment, ended=ended)


def _ignore(span: StartSpan, is_late: bool) -> None:
    pass


class StartTimeline:
    """Takes down one start, in seconds of ``time.monotonic``; from any thread.

    Parameters
    ----------
    on_ended
        Called with each span that has ended, and with whether the start was over by then; in
        whatever thread has ended it.
    """

    def __init__(self, on_ended: Callable[[StartSpan, bool], None] = _ignore) -> None:
        self._on_ended = on_ended
        self._lock = threading.Lock()
        # In the order in which they began.
        self._spans: dict[str, StartSpan] = {}
        self._phase = ""
        self._is_over = False

    def phase(self, name: str) -> None:
        """What follows the phase before has begun, unless it had already."""
        if name != self._phase:
            now = time.monotonic()
            self._end(self._phase, now, None)
            self._phase = name
            self._begin(name, now)

    def begin(self, name: str) -> None:
        """Something has begun that may go on beside phases, unless it had already."""
        self._begin(name, time.monotonic())

    def end(self, name: str, error: BaseException | None = None) -> None:
        """It has ended; nothing is ended twice."""
        self._end(name, time.monotonic(), error)

    def finish(self, error: BaseException | None = None) -> tuple[list[StartSpan], float]:
        """The start is over, and with it the last phase: all that began so far, and the moment."""
        now = time.monotonic()
        self._end(self._phase, now, error)
        with self._lock:
            self._is_over = True
            spans = list(self._spans.values())
            # Through their tracebacks errors would keep a model alive.
            self._spans = {span.name: span._replace(error=None) for span in spans}
        return spans, now

    @property
    def began(self) -> float:
        """When the first part did; there must be one."""
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
    """A table: when each part began, how long it took, and a bar on a scale that all share.

    Parameters
    ----------
    spans
        Times since the start began, of which at least one is not 0.
    width
        Of the scale, in characters.
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
        # Whatever happened is seen, however short.
        first = min(width - 1, round(width * span.began / total))
        bar = " " * first + "#" * max(1, round(width * end / total) - first)
        note = "" if span.error is None else f"{'':<{width - len(bar)}}  failed"
        lines.append(f"  {span.name:<{longest}} {span.began:9.2f} {took:>9}  {bar}{note}")
    return lines
