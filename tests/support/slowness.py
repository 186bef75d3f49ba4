"""How slow this machine is now: bounds on CPU time are to hold on every machine."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Final

# CPU seconds of `_piece` on the machine where bounds were set.
_REFERENCE: Final = 0.006


@contextlib.contextmanager
def own_time() -> Iterator[Callable[[], float]]:
    """Yields a function that returns the CPU seconds of this thread since the block began.

    No garbage is collected within it: that of earlier tests may take seconds.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        begun = time.thread_time()
        yield lambda: time.thread_time() - begun
    finally:
        if collects:
            gc.enable()


def slowness() -> float:
    """Return how many times slower than that machine this one computes now, at least 1.

    It is the fastest of several runs of a piece of Python, by the time of this thread.
    """
    found = []
    for _ in range(5):
        started = time.thread_time()
        _piece()
        found.append(time.thread_time() - started)
    return max(1.0, min(found) / _REFERENCE)


def _piece() -> None:
    table: dict[int, str] = {}
    for number in range(30_000):
        table[number & 1023] = f"{number} of {len(table)}"
