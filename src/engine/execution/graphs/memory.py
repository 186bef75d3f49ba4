"""Measures the memory that graphs will take, before KV memory takes all the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from src.compile.graphs import CaptureBackend, GraphShape


def trial_bytes(
    backend: CaptureBackend,
    shapes: Sequence[GraphShape],
    capture: Callable[[GraphShape], object],
) -> int:
    """Estimate the device bytes that capturing all of ``shapes`` will take.

    The graphs share one memory pool, whose size is set by the largest shape of each kind: these are
    captured. Then one more shape of each kind is captured, and every further one is assumed to take
    as much. No capture is kept.

    Parameters
    ----------
    shapes
        Largest first.
    capture
        Captures one shape; the returned object keeps the memory.
    """
    before = _free_bytes(backend)
    kept: list[object] = []
    of_kind: dict[tuple[str, bool], list[GraphShape]] = {}
    for shape in shapes:
        of_kind.setdefault((shape.kind, shape.adapts), []).append(shape)
    for largest, *_ in of_kind.values():
        kept.append(capture(largest))
    total = before - _free_bytes(backend)
    for _, *others in of_kind.values():
        if others:
            free = _free_bytes(backend)
            kept.append(capture(others[0]))
            total += len(others) * max(0, free - _free_bytes(backend))
    kept.clear()
    backend.start_over()
    return max(0, total)


def _free_bytes(backend: CaptureBackend) -> int:
    """Free bytes, after releasing memory that only the runs before the captures took."""
    backend.release()
    return backend.free_bytes()
