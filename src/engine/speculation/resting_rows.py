"""Rows for which no drafts are planned until a guess is found for them.

A step that may have drafts takes longer to plan and to read, and so do those behind it until its
tokens are known. So a row without guesses has none of them. It is looked at on the side of exact
steps, and the result of such a step says that its next ones may have drafts again.
"""

from __future__ import annotations

from typing import Final

from src.core.plan import RowStep, StepPlan
from src.engine.speculation.widths import Widths

# For how many steps a row rests that will be woken.
_UNTIL_WOKEN: Final = 1 << 30
_FROM_NOW_ON: Final = -1


class RestingRows:
    """Which rows rest, and which are to be woken.

    Parameters
    ----------
    widths
        Knows when the pause of a row ends.
    """

    def __init__(self, widths: Widths) -> None:
        self._widths = widths
        self._resting: set[int] = set()
        self._woken: set[int] = set()
        # Rows of which no result has said yet whether they rest.
        self._new: set[int] = set()

    @property
    def has_news(self) -> bool:
        """Whether the next result has to say of rows that they rest, or are woken."""
        return bool(self._woken or self._new)

    def install(self, row: int) -> None:
        """The row has a request that nobody was asked for: it rests, and is looked at next."""
        if not self._widths.always:
            self._resting.add(row)
            self._new.add(row)
            self._widths.asks_again()

    def add(self, row: int) -> None:
        """The row has no guesses, or wrong ones; it rests if it has a pause."""
        if self._widths.rests(row):
            self._resting.add(row)
            self._woken.discard(row)

    def vacate(self, row: int) -> None:
        """The row's request has ended, or the row has another one."""
        self._resting.discard(row)
        self._woken.discard(row)
        self._new.discard(row)

    def rests(self, row: int) -> int:
        """For how many steps from the next one on drafts of a row are of no use.

        -1: it is woken, which is said once.
        """
        self._new.discard(row)
        if row in self._resting:
            return _UNTIL_WOKEN
        pause = max(0, self._widths.rests(row) - 1)
        if row in self._woken:
            self._woken.discard(row)
            return pause or _FROM_NOW_ON
        return pause

    def due(self, plan: StepPlan) -> list[RowStep]:
        """Steps of a plan whose rows are looked at now: they rest, and their pause has ended."""
        resting, asks = self._resting, self._widths.asks
        if not (resting and self._widths.asks_any()):
            return []
        due = [
            step for step in plan.rows if step.row in resting and step.samples and asks(step.row)
        ]
        if len(due) < len(resting) and len(due) < sum(map(asks, resting)):
            # Rows that are in no step now are looked at in their next one.
            self._widths.asks_again()
        return due

    def wake(self, row: int) -> None:
        """The row may have drafts again, as the result of this step will say, if it rested."""
        if row in self._resting:
            self._resting.discard(row)
            self._woken.add(row)
