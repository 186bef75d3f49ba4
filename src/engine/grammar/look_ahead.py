"""Drafts of rows that a grammar or a thinking budget restricts, and the masks behind them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from src.engine.grammar.follower import Follower
from src.engine.grammar.masks import MaskTable
from src.engine.grammar.thinking import RowThinking

logger = logging.getLogger(__name__)

# Seconds of this thread that looking ahead in grammars takes in a step, before the device goes on.
_LONGEST_LOOK: Final = 0.001


class Wanted(NamedTuple):
    """A row that may have up to ``most`` drafts, and what was guessed; perhaps nothing."""

    row: int
    guessed: Sequence[int]
    most: int


class LookAhead:
    """What the rows of one step draft. Only the grammar thread uses it.

    Parameters
    ----------
    table
        The masks of rows at the position of the next token.
    followers
        Row -> its follower.
    """

    def __init__(
        self, table: MaskTable, thinking: RowThinking, followers: Mapping[int, Follower]
    ) -> None:
        self._table = table
        self._thinking = thinking
        self._followers = followers
        # Row -> its drafts in the next step, of which the step may take fewer.
        self._drafts: dict[int, list[int]] = {}
        # Steps so far: each begins with another row, since there may not be time for all.
        self._turn = 0

    def choose(self, wanted: Sequence[Wanted], owners: Sequence[int | None]) -> list[list[int]]:
        """The drafts of each of these rows: what is possible of those guessed, and what is forced.

        None of them ends an output, since nothing could be asked behind it. The device waits for
        this, so once it has taken a millisecond the other rows with a grammar have none.

        Parameters
        ----------
        owners
            Per row: key of its request, if that has a grammar.
        """
        self._drafts.clear()
        self._turn += 1
        started, rows = time.thread_time(), list(zip(wanted, owners, strict=True))
        first = self._turn % max(1, len(rows))
        for (row, guessed, most), owner in rows[first:] + rows[:first]:
            if owner is not None and time.thread_time() - started > _LONGEST_LOOK:
                self._drafts[row] = []
                continue
            # Nobody needs a draft, so whatever is wrong with one, no request ends by it.
            try:
                drafts = list(self._thinking.drafts(row, guessed, most))
                if owner is not None:
                    drafts = self._allowed(row, owner, drafts, most)
            # A panic of the library is not an Exception.
            except BaseException:
                logger.exception("the drafts of a row could not be looked at")
                drafts = []
            self._drafts[row] = drafts
        return [self._drafts[each.row] for each in wanted]

    def without_drafts(self, wanted: Sequence[Wanted], owners: Sequence[int | None]) -> list[int]:
        """Those of these rows that have no drafts any more, whatever is guessed."""
        followers = [self._followers.get(each.row) for each in wanted]
        return [
            each.row
            for each, follower, owner in zip(wanted, followers, owners, strict=True)
            if follower is not None and follower.key == owner and follower.never_drafts
        ]

    def _allowed(self, row: int, owner: int, drafts: list[int], most: int) -> list[int]:
        follower = self._followers.get(row)
        if follower is None or follower.key != owner:
            return []
        drafts = self._without_end(row, drafts)
        if drafts and not self._table.allows(row, drafts[0]):
            drafts = []
        return self._without_end(row, follower.drafts(drafts, most))

    def _without_end(self, row: int, drafts: list[int]) -> list[int]:
        for place, token_id in enumerate(drafts):
            if self._table.ends(row, token_id):
                return drafts[:place]
        return drafts

    def masks_behind(
        self, row: int, count: int, *, has_grammar: bool
    ) -> tuple[list[np.ndarray | None], list[int]]:
        """The masks behind a row's first ``count`` drafts, and which have a token that must come.

        A mask is [W] int32, or None where nothing restricts the row.
        """
        drafts = self._drafts[row][:count]
        masks: list[np.ndarray | None] = [None] * count
        if has_grammar:
            masks = self._by_grammar(row, drafts)
        musts = self._thinking.forced_behind(row, drafts)
        forced = [place for place, token_id in enumerate(musts) if token_id is not None]
        for place in forced:
            masks[place] = self._table.only(musts[place] or 0)
        return masks, forced

    def _by_grammar(self, row: int, drafts: Sequence[int]) -> list[np.ndarray | None]:
        mask = self._table.masks[row]
        own = mask.copy()
        nothing = np.zeros_like(own)
        try:
            found = self._followers[row].masks_behind(
                drafts, mask, lambda: self._table.restrict([row]) is None
            )
        except BaseException:
            logger.exception("the masks behind a row's drafts could not be computed")
            found = [None] * len(drafts)
        finally:
            mask[:] = own
        return [nothing if each is None else each for each in found]
