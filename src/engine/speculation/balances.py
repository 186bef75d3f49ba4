"""How long rows may wait for drafts of others: as long as drafts have helped them, and a little."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

# How much longer drafts of others may make every step for rows that have none, if there are many.
_NEIGHBOURLY: Final = 0.03
# How much longer, in steps, a request's steps may get before drafts have brought it anything. Rows
# that are able to wait for each other once will gain from it, if they repeat themselves by turns.
_IN_ADVANCE: Final = 1.0
# The most that is kept of what a row has gained: who repeats itself no more does not wait for ever.
_MOST_KEPT: Final = 8.0


class Balances:
    """What each row has gained by drafts, less what it has lost by all of them.

    In steps: a token that a draft brings saves its row one, and a step that drafts make half as
    long again costs every row half of one. A row that has no guess in a step may lose what it has
    gained before. So rows whose texts repeat themselves at different times help each other, and
    nobody pays for a neighbour who alone has something from it.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}

    def vacate(self, row: int) -> None:
        """The row has another request now."""
        self._steps.pop(row, None)

    def bearable(self, others: Collection[int], lacking: int, num_rows: int) -> float:
        """How much longer a step may get, as a part of it, for ``lacking`` rows without drafts.

        ``others``: those rows, as far as they are known.
        """
        if not lacking:
            return float("inf")
        kept = min([self._steps.get(row, _IN_ADVANCE) for row in others], default=0.0)
        # The more rows have none, the less may drafts of others cost them.
        return max(kept, _NEIGHBOURLY * num_rows / lacking)

    def gained(self, row: int, tokens: int) -> None:
        """So many drafts of a row were right."""
        kept = self._steps.get(row, _IN_ADVANCE) + tokens
        self._steps[row] = min(kept, _MOST_KEPT)

    def lost(self, rows: Collection[int], steps: float) -> None:
        """Drafts make a step with these rows longer by so many steps without any."""
        for row in rows:
            self._steps[row] = max(0.0, self._steps.get(row, _IN_ADVANCE) - steps)
