"""How many positions a step with drafts may sample, and counts of drafts that were verified."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# So few positions have small logits, even with a large vocabulary.
_FEW_SAMPLED: Final = 64


def most_sampled(max_num_seqs: int, max_drafts: int) -> int:
    """The most positions that a step samples, drafts included: its logits have so many rows.

    As many as rows may sample without drafts, so that drafts make no step's logits larger. With few
    rows it is a small fixed number, or one row with all of its drafts.
    """
    return max(max_num_seqs, _FEW_SAMPLED, 1 + max_drafts) if max_drafts else max_num_seqs


class DraftCounts:
    """What was drafted and accepted since the start; it only grows.

    Parameters
    ----------
    sources, most
        Who may draft, and the most drafts of a row: they have counts of 0 from the start, so that
        whoever reads them from time to time sees their first drafts too.

    Attributes
    ----------
    rows, drafted, accepted
        Rows of steps that had drafts; their drafts; those of them that were right.
    accepted_at
        Place among a row's drafts, from 0 -> how many were accepted there.
    by_source
        Who has drafted -> how many, and how many of them were right.
    """

    def __init__(self, sources: Iterable[str] = (), most: int = 0) -> None:
        self.rows = self.drafted = self.accepted = 0
        self.accepted_at = [0] * most
        self.by_source = dict.fromkeys(sources, (0, 0))

    def add(self, drafted: int, accepted: int, source: str = "") -> None:
        """A row had so many drafts in a step, and so many of them were right."""
        self.rows += 1
        self.drafted += drafted
        self.accepted += accepted
        before, right = self.by_source.get(source, (0, 0))
        self.by_source[source] = (before + drafted, right + accepted)
        missing = drafted - len(self.accepted_at)
        if missing > 0:
            self.accepted_at += [0] * missing
        for place in range(accepted):
            self.accepted_at[place] += 1
