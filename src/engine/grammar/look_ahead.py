"""Drafts of rows that a grammar or a thinking budget restricts, and the masks behind them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from src.engine.grammar.follower import Follower
from src.engine.grammar.masks import MaskTable
from src.engine.grammar.thinking import RowThinking

logger = logging.getLogger(__name__)


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

    def choose(self, wanted: Sequence[Wanted], owners: Sequence[int | None]) -> list[list[int]]:
        """The drafts of each of these rows: what is possible of those guessed, and what is forced.

        None of them ends an output, since nothing could be asked behind it.

        Parameters
        ----------
        owners
            Per row: key of its request, if that has a grammar.
        """
        self._drafts.clear()
        for (row, guessed, most), owner in zip(wanted, owners, strict=True):
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
        return list(self._drafts.values())

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
