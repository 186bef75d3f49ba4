"""Guesses that a text goes on as it did when its last tokens stood in it before."""

from __future__ import annotations

import numpy as np

from src.engine.speculation.widths import Guess

# The most places of a match that are followed, the latest ones: a very common token has many.
_MOST_PLACES = 64


class Lookup:
    """Looks for the longest end of a row's tokens that occurs in them before.

    It is what a suffix automaton of the tokens would answer, up to a length. But it keeps nothing:
    it scans the row's tokens once, which costs a microsecond for thousands of them, and no
    preemption, rejected draft or new owner of the row can leave anything behind. (Prompt lookup
    decoding, A. Saxena, 2023; suffix decoding, arXiv 2411.04975.)

    Parameters
    ----------
    least, longest
        The fewest tokens that a match has, and the most that it needs.
    """

    def __init__(self, *, least: int, longest: int) -> None:
        self._least = least
        self._longest = longest

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        """See `Drafter`."""
        places, length = self._places(tokens)
        return Guess(followed(tokens, places, most), length) if len(places) else None

    def _places(self, tokens: np.ndarray) -> tuple[np.ndarray, int]:
        """Indices behind the places of the longest end that occurs before, and its length."""
        last = len(tokens) - 1
        if last < self._least:
            return np.empty(0, np.int64), 0
        # Where a match of one token ends; longer matches are among them.
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        length = 1
        while length < self._longest and len(ends):
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[last - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length < self._least:
            return np.empty(0, np.int64), 0
        behind: np.ndarray = ends[-_MOST_PLACES:] + 1
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
