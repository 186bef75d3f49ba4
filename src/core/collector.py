"""Keeps Python's garbage collector away from what stays, and out of captures.

A loaded model and its libraries are some 200,000 objects, and now and then the collector would walk
through all of them, which holds up every stream for 100 ms. In a server's process they stay to the
end, so the collector is told to overlook them. A capture of graphs launches thousands of small
calls, and takes many times as long if the collector is not kept away altogether. An import of torch
takes a fifth less without it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def freeze_collector() -> None:
    """What exists now is not looked at again, until :func:`thaw_collector`.

    For a process that does nothing else: whatever garbage there is stays. It is not looked for
    first, since there is next to none after a load, and to find it takes as long as one pause.
    """
    gc.freeze()


@contextlib.contextmanager
def frozen_collector(*, collect: bool = True) -> Iterator[None]:
    """Collect once, then not at all; what exists at the end is not looked at again.

    Without ``collect`` not even once, for a capture between two steps.
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
    """Not once meanwhile: while modules are imported nearly all that is made stays.

    Looking for garbage takes a fifth of the time of importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def thaw_collector() -> None:
    """Have everything looked at again: what was frozen may be garbage now."""
    gc.unfreeze()
