"""Guesses that a text goes on as it did when its last tokens stood in it before."""

from __future__ import annotations

from typing import Final

import numpy as np

from src.engine.speculation.widths import Guess

# The last tokens of a row, among which places are looked for.
_WINDOW: Final = 8192
# Tokens that a place is first found by, at most: each costs a pass over the window.
_FOUND_BY: Final = 4
# The most places whose matches are measured, the latest ones: a common end has many.
_MOST_PLACES: Final = 128
# The most places of the longest match that are followed, the latest ones.
_MOST_FOLLOWED: Final = 16


class Lookup:
    """Looks for the longest end of a row's tokens that occurs in them before.

    It keeps nothing, so no preemption, rejected draft or new owner of the row can leave anything
    behind. Instead it scans the row's tokens at every call. So that no text makes the device wait,
    whatever its length, it looks at the last 8192 tokens, at 128 places of an end, and follows 16
    of them. It may miss a longer match that is further back. (Prompt lookup decoding, A. Saxena,
    2023; suffix decoding, arXiv 2411.04975.)

    Parameters
    ----------
    least, longest
        The fewest tokens that a match has, and the most that it needs.
    """

    def __init__(self, *, least: int, longest: int) -> None:
        self._least = least
        self._back = np.arange(longest)

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        """See `Drafter`."""
        window = tokens[-_WINDOW:]
        places, length = self._places(window)
        return Guess(followed(window, places, most), length) if len(places) else None

    def _places(self, tokens: np.ndarray) -> tuple[np.ndarray, int]:
        """Indices behind the places of the longest end that occurs before, and its length."""
        last, nothing = len(tokens) - 1, (np.empty(0, np.int64), 0)
        if last < self._least:
            return nothing
        # Where matches of a few tokens end; longer ones are among them.
        few = min(self._least, _FOUND_BY)
        found = tokens[few - 1 : last] == tokens[last]
        for before in range(1, few):
            found &= tokens[few - 1 - before : last - before] == tokens[last - before]
        ends = np.flatnonzero(found)[-_MOST_PLACES:] + (few - 1)
        if not len(ends):
            return nothing
        # [places, tokens backwards from the end]: whether they are equal.
        back = self._back[:last]
        at = ends[:, None] - back
        equal = (tokens[np.maximum(at, 0)] == tokens[last - back]) & (at >= 0)
        lengths = np.where(equal.all(1), len(back), equal.argmin(1))
        length = int(lengths.max())
        if length < self._least:
            return nothing
        behind: np.ndarray = ends[lengths == length][-_MOST_FOLLOWED:] + 1
        return behind, length


def followed(tokens: np.ndarray, places: np.ndarray, most: int) -> list[int]:
    """The tokens that follow these places, ``most`` at most: at each one what most of them have.

    Of several that are equally common the one wins that stood there last.

    Parameters
    ----------
    places
        Indices of ``tokens``, ascending.
    """
    if len(places) == 1:
        start = int(places[0])
        found: list[int] = tokens[start : start + most].tolist()
        return found
    found = []
    count = len(tokens)
    at = places.tolist()
    while at and len(found) < most:
        votes: dict[int, list[int]] = {}
        for place in at:
            votes.setdefault(int(tokens[place]), []).append(place + 1)
        chosen = max(votes, key=lambda token: (len(votes[token]), votes[token][-1]))
        found.append(chosen)
        at = [place for place in votes[chosen] if place < count]
    return found
