"""Which shapes are captured, and which of them serves a step: pure functions of integers.

A captured shape is fixed, so a step is padded to the next size of a ladder. Sizes are close enough
to keep padding small, and far enough apart to keep their number small: 1, 2, 4, then every 8 up to
64; from there on, gaps of an eighth to a quarter of the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

# "decode": a row is a token, the whole step is one graph. "verify": the same, of rows of several
# tokens, all of which but the first are drafts. "mixed": graphs between attention calls.
ShapeKind = Literal["decode", "mixed", "verify"]

_SMALL_RUNGS: Final = (1, 2, 4)
_STEP: Final = 8
# Smaller mixed steps are padded to this size: a small piece costs its launch, not its arithmetic.
_SMALLEST_MIXED: Final = 16
# Tokens of a row that are captured where drafts are verified, beside the most that there may be.
_WIDTHS: Final = (2, 4, 8)
# Decode steps of up to this size (few users) are captured first.
_LARGEST_FIRST: Final = 8


class GraphShape(NamedTuple):
    """Shape of one captured step.

    ``num_tokens`` includes padding. ``adapts``: it is the program with adapters that is captured.
    ``width``: tokens of a row, where all rows have as many; 1 where they do not.
    """

    kind: ShapeKind
    num_tokens: int
    adapts: bool = False
    width: int = 1


def rungs(limit: int) -> tuple[int, ...]:
    """Sizes to pad to, ascending; the last one is ``limit``. None at all if that is 0.

    For n > 8, the next size above n is less than ``max(8, n / 4)`` larger.
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
    # A power of two, so that every size is a multiple of its gap.
    return max(_STEP, 1 << (size.bit_length() - 3))


def padded(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending ``sizes`` that is at least ``size``; ``None`` if none is."""
    return next((rung for rung in sizes if rung >= size), None)


class PaddingLadder:
    """The shapes of one engine.

    Parameters
    ----------
    max_rows
        Maximal number of rows of a captured decode step; 0 captures none.
    max_mixed_tokens
        Maximal number of tokens of a captured step with prompts; 0 captures none.
    adapts
        Whether each shape is captured with adapters as well.
    max_drafts
        The most drafts of a row; 0 captures no steps that verify some.
    max_sampled
        The most positions that such a step samples.
    """

    def __init__(
        self,
        max_rows: int,
        max_mixed_tokens: int,
        *,
        adapts: bool = False,
        max_drafts: int = 0,
        max_sampled: int = 0,
    ) -> None:
        self._variants = (False, True) if adapts else (False,)
        self.max_rows = max_rows
        self.max_mixed_tokens = max_mixed_tokens
        smallest = min(_SMALLEST_MIXED, max_mixed_tokens)
        self._sizes: dict[ShapeKind, tuple[int, ...]] = {
            "decode": rungs(max_rows),
            "mixed": tuple(size for size in rungs(max_mixed_tokens) if size >= smallest),
        }
        # Width -> numbers of rows, a short ladder: each of them is a graph.
        self._verified = {
            width: tuple(rows for rows in _doublings(max_rows) if rows * width <= max_sampled)
            for width in verify_widths(max_drafts)
        }

    @property
    def shapes(self) -> list[GraphShape]:
        """All shapes, largest first: a large graph's memory is reused for the smaller ones."""
        every = [
            GraphShape(kind, size, adapts)
            for kind, sizes in self._sizes.items()
            for size in sizes
            for adapts in self._variants
        ]
        every += [
            GraphShape("verify", rows * width, adapts, width)
            for width, sizes in self._verified.items()
            for rows in sizes
            for adapts in self._variants
        ]
        return sorted(
            every, key=lambda shape: (-shape.num_tokens, shape.kind, shape.adapts, shape.width)
        )

    @property
    def first(self) -> list[GraphShape]:
        """The shapes that are captured before all others, largest first."""
        return [
            shape
            for shape in self.shapes
            if shape.kind == "decode" and shape.num_tokens <= _LARGEST_FIRST
        ]

    def candidates(
        self, num_tokens: int, *, decodes: bool, adapts: bool = False
    ) -> list[GraphShape]:
        """The shapes that can serve a step, best first.

        Parameters
        ----------
        num_tokens
            Number of tokens of the step.
        decodes
            Whether each of its rows is one token and samples.
        adapts
            Whether one of its rows has an adapter.
        """
        kinds: tuple[ShapeKind, ...] = ("decode", "mixed") if decodes else ("mixed",)
        found = []
        for kind in kinds:
            size = padded(num_tokens, self._sizes[kind])
            if size is not None:
                found.append(GraphShape(kind, size, adapts))
        return found

    def verifying(self, num_rows: int, width: int, *, adapts: bool = False) -> GraphShape | None:
        """The shape that serves a step of rows with up to ``width`` tokens each, some drafts.

        Of wider shapes the next one is taken, although there are few: a step is as long as its
        padded tokens take, so a plan had better have a width of the ladder.
        """
        wider = next((each for each in self._verified if each >= width), None)
        rows = None if wider is None else padded(num_rows, self._verified[wider])
        if wider is None or rows is None:
            return None
        return GraphShape("verify", rows * wider, adapts, wider)


def verify_widths(max_drafts: int) -> tuple[int, ...]:
    """Tokens of rows with drafts, ascending: a known one, and drafts."""
    if max_drafts < 1:
        return ()
    return (*(width for width in _WIDTHS if width <= max_drafts), max_drafts + 1)


def _doublings(limit: int) -> tuple[int, ...]:
    """1, 2, 4 and so on up to the limit, which is the last one."""
    sizes = [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent < limit]
    return (*sizes, limit) if limit > 0 else ()
