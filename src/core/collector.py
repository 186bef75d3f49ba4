"""Keeps Python's garbage collector away from long-lived objects, and out of graph captures.

A loaded model and its libraries are some 200,000 objects. From time to time the collector would
walk all of them, which delays every stream by 100 ms. In a server's process they live to the end,
so they are frozen: the collector ignores them. A capture of graphs makes thousands of small calls,
and takes many times as long while the collector runs. Importing torch takes a fifth less time
without it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def freeze_collector() -> None:
    """Make the collector ignore all objects that exist now, until `thaw_collector`.

    For a process that only runs the engine, because garbage that exists now is never freed. It is
    not collected first: there is hardly any after a load, and collecting takes as long as one
    pause.
    """
    gc.freeze()


@contextlib.contextmanager
def frozen_collector(*, collect: bool = True) -> Iterator[None]:
    """Collect once, then pause the collector; freeze all objects that exist at the end.

    ``collect=False`` skips the first collection, for a capture between two steps.
    """
    if collect:
        gc.collect()
    gc.freeze()
    with paused_collector():
        try:
            yield
        finally:
            gc.freeze()


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collector, for imports: nearly all objects that these make are long-lived.

    Collecting takes a fifth of the time of importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def thaw_collector() -> None:
    """Make the collector look at all objects again: frozen ones may be garbage now."""
    gc.unfreeze()
