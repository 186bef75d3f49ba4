"""Which shapes are captured, and which of them serves a step: pure functions of integers.

A captured shape is fixed, so a step is padded to the next rung of a ladder. Rungs lie close enough
that little is computed for nothing, and far enough apart that there are few of them: 1, 2, 4, 8 and
every 8 up to 64; from there on every eighth to quarter of the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

# "decode": a row is a token, the whole step is one graph. "mixed": graphs between attention calls.
ShapeKind = Literal["decode", "mixed"]

_SMALL_RUNGS: Final = (1, 2, 4)
_STEP: Final = 8
# Mixed steps of fewer tokens are padded to this many: a piece costs its launch, not its arithmetic.
_SMALLEST_MIXED: Final = 16
# Decode steps up to this size, those of few users, are captured first.
_LARGEST_FIRST: Final = 8


class GraphShape(NamedTuple):
    """What one captured step computes: ``num_tokens``, padding included, of ``kind``."""

    kind: ShapeKind
    num_tokens: int


def rungs(limit: int) -> tuple[int, ...]:
    """Sizes to pad to, ascending, the last one ``limit``; none where that is 0.

    The next rung above n > 8 is less than ``max(8, n / 4)`` away from n.
    """
    sizes: list[int] = []
    size = 1
    while size < limit:
        sizes.append(size)
        size += _gap(size)
    return (*sizes, limit) if limit > 0 else ()


def _gap(size: int) -> int:
    if size in _SMALL_RUNGS:
        return size
    # A power of two, so that every rung is a multiple of its gap.
    return max(_STEP, 1 << (size.bit_length() - 3))


def padded(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending ``sizes`` that holds ``size``; ``None`` over the last."""
    return next((rung for rung in sizes if rung >= size), None)


class PaddingLadder:
    """The shapes of one engine.

    Parameters
    ----------
    max_rows
        Of a decode step; 0 captures none.
    max_mixed_tokens
        Of a step with prompts in it; 0 captures none.
    """

    def __init__(self, max_rows: int, max_mixed_tokens: int) -> None:
        self.max_rows = max_rows
        self.max_mixed_tokens = max_mixed_tokens
        smallest = min(_SMALLEST_MIXED, max_mixed_tokens)
        self._sizes: dict[ShapeKind, tuple[int, ...]] = {
            "decode": rungs(max_rows),
            "mixed": tuple(size for size in rungs(max_mixed_tokens) if size >= smallest),
        }

    @property
    def shapes(self) -> list[GraphShape]:
        """All of them, largest first: memory of a large graph serves the smaller ones after it."""
        every = [GraphShape(kind, size) for kind, sizes in self._sizes.items() for size in sizes]
        return sorted(every, key=lambda shape: (-shape.num_tokens, shape.kind))

    @property
    def first(self) -> list[GraphShape]:
        """Those that are captured before all others, largest first."""
        return [
            shape
            for shape in self.shapes
            if shape.kind == "decode" and shape.num_tokens <= _LARGEST_FIRST
        ]

    def candidates(self, num_tokens: int, *, decodes: bool) -> list[GraphShape]:
        """The shapes that can serve a step, best first.

        Parameters
        ----------
        num_tokens
            That it computes.
        decodes
            Whether each of its rows is one token, and samples.
        """
        kinds: tuple[ShapeKind, ...] = ("decode", "mixed") if decodes else ("mixed",)
        found = []
        for kind in kinds:
            size = padded(num_tokens, self._sizes[kind])
            if size is not None:
                found.append(GraphShape(kind, size))
        return found
