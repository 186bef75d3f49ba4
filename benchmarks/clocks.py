"""Measures the CPU time of methods while an engine runs."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any


class _Frames(threading.local):
    """Per thread: seconds of inner measured calls, for each measured call in progress."""

    def __init__(self) -> None:
        self.inner = [0.0]


class Clocks:
    """CPU time of calls in their own threads, without that of inner measured calls.

    Attributes
    ----------
    values
        Name -> the seconds of each call, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self._frames = _Frames()
        self._restore: list[Callable[[], None]] = []

    def measure(
        self, name: str, owner: Any, method: str, *, keeps: Callable[[Any], bool] | None = None
    ) -> None:
        """Measure a method of a class or an object until :meth:`close`.

        ``keeps`` decides by the result whether a call counts; a call that raises does count.
        """
        original = getattr(owner, method)
        was_own = method in vars(owner)
        values = self.values.setdefault(name, [])
        frames = self._frames

        @functools.wraps(original)
        def timed(*arguments: Any, **options: Any) -> Any:
            inner = frames.inner
            inner.append(0.0)
            is_kept = True
            started = time.thread_time()
            try:
                result = original(*arguments, **options)
                if keeps is not None:
                    is_kept = keeps(result)
                return result
            finally:
                spent = time.thread_time() - started
                own = spent - inner.pop()
                inner[-1] += spent
                if is_kept:
                    values.append(own)

        setattr(owner, method, timed)
        undo = functools.partial(setattr, owner, method, original)
        self._restore.append(undo if was_own else functools.partial(delattr, owner, method))

    def clear(self) -> None:
        """Delete all measurements."""
        for values in self.values.values():
            values.clear()

    def close(self) -> None:
        """Restore the original methods."""
        for undo in reversed(self._restore):
            undo()
        self._restore.clear()


def clock_cost() -> float:
    """Seconds that one pair of clock readings adds to the code between them, and in total."""
    started = time.thread_time()
    for _ in range(10_000):
        time.thread_time()
    return (time.thread_time() - started) / 10_000
