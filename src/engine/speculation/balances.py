"""How long rows may wait for drafts of others: as long as drafts have helped them, and a little."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

# How much longer drafts of others may make every step for rows that have none, if there are many.
_NEIGHBOURLY: Final = 0.02
# What a row may lose that has not gained anything: a part of each of its steps, which adds up to
# the time of so many. Rows that are able to wait for each other once gain from it afterwards.
_PER_STEP: Final = 0.01
_MOST_SAVED: Final = 1.0
# The most that is kept of what a row has gained: who repeats itself no more does not wait for ever.
_MOST_KEPT: Final = 8.0


class Balances:
    """What each row has gained by drafts, less what it has lost by all of them.

    In steps: a token that a draft brings saves its row one, and a step that drafts make half as
    long again costs every row half of one. A row that has no guess in a step may lose what it has
    gained before. So rows whose texts repeat themselves at different times help each other, and a
    row that gains nothing loses a hundredth of its time by that.
    """

    def __init__(self) -> None:
        self._step = 0
        # Row -> what it may lose, and in which step that was so.
        self._kept: dict[int, tuple[float, int]] = {}

    def begin(self, steps: int) -> None:
        """A step begins; ``steps``: with it so many have begun since the last call."""
        self._step += steps

    def vacate(self, row: int) -> None:
        """The row has another request now."""
        self._kept[row] = 0.0, self._step

    def bearable(self, others: Collection[int], lacking: int, num_rows: int) -> float:
        """How much longer a step may get, as a part of it, for ``lacking`` rows without drafts.

        ``others``: those rows, as far as they are known.
        """
        if not lacking:
            return float("inf")
        kept = min(map(self._of, others), default=0.0)
        # The more rows have none, the less may drafts of others cost them.
        return max(kept, _NEIGHBOURLY * num_rows / lacking)

    def _of(self, row: int) -> float:
        kept, since = self._kept.get(row, (0.0, 0))
        return max(kept, min(_MOST_SAVED, kept + _PER_STEP * (self._step - since)))

    def gained(self, row: int, tokens: int) -> None:
        """So many drafts of a row were right."""
        self._kept[row] = min(self._of(row) + tokens, _MOST_KEPT), self._step

    def lost(self, rows: Collection[int], steps: float) -> None:
        """Drafts make a step with these rows longer by so many steps without any."""
        for row in rows:
            self._kept[row] = max(0.0, self._of(row) - steps), self._step
