"""Guesses that a text goes on as it did when its last tokens stood in it before."""

from __future__ import annotations

from typing import Final

import numpy as np

from src.engine.speculation.guess import Guess
from src.engine.speculation.places import ends_before, places_of

# The last tokens of a row, among which places are looked for.
_WINDOW: Final = 8192
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
    source
        What its guesses are counted as.
    """

    def __init__(self, *, least: int, longest: int, source: str = "suffix") -> None:
        self._least = least
        self._longest = longest
        self._source = source

    def may_guess(self, row: int, tokens: np.ndarray) -> bool:
        """See `Screening`."""
        return ends_before(tokens[-_WINDOW:], self._least)

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        """See `Drafter`."""
        window = tokens[-_WINDOW:]
        places, length = places_of(window[:-1], window, self._least, self._longest)
        if not length:
            return None
        places = places[-_MOST_FOLLOWED:]
        return Guess(followed(window, places, most), length, self._source)


class RestrictedLookup(Lookup):
    """The same for rows whose tokens something restricts, such as a grammar, and for no others.

    It stands beside a drafter with weights, which knows no grammar and is not asked for those rows.
    """


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
