"""What the graphs of an engine will take, found out before KV memory takes all the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from src.compile.graphs import CaptureBackend, GraphShape


def trial_bytes(
    backend: CaptureBackend,
    shapes: Sequence[GraphShape],
    capture: Callable[[GraphShape], object],
) -> int:
    """Bytes that capturing all of ``shapes`` will take from the device.

    They share one pool of memory, so the largest shape of each kind is captured to see how large
    that is; what one more of a kind takes beside it is taken for every other one of that kind.
    Nothing of it is kept.

    Parameters
    ----------
    shapes
        Largest first.
    capture
        Captures one; what it returns holds its memory.
    """
    before = _free_bytes(backend)
    kept: list[object] = []
    of_kind: dict[str, list[GraphShape]] = {}
    for shape in shapes:
        of_kind.setdefault(shape.kind, []).append(shape)
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
    """Without what only the runs before the captures took."""
    backend.release()
    return backend.free_bytes()
