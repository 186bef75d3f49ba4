"""Keeps Python's garbage collector out of captures.

A capture launches thousands of small calls, and every few hundred of them would have the collector
walk through all that a loaded model consists of: with it, captures take many times as long. What is
there after them stays until the engine closes, so the collector is told to overlook it from then on
too, which shortens the longest pauses between tokens.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_collector(*, collect: bool = True) -> Iterator[None]:
    """Collect once, then not at all; what exists at the end is not looked at again.

    Without ``collect`` not even once, for a capture between two steps.
    """
    was_enabled = gc.isenabled()
    if collect:
        gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def thaw_collector() -> None:
    """Have everything looked at again: what was frozen may be garbage now."""
    gc.unfreeze()
