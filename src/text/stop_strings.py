"""Stop strings over a text that arrives in pieces.

The definition, which does not depend on where the text is cut: characters are read one by one, and
the first character that completes any stop string ends the text (the *earliest end* wins; a stream
cannot wait for a longer match that may never come). Where several stop strings end at that same
character, the longest, so the one that starts first, is the match. The text is cut before the
match, or after it when stop strings are to be included.

Each stop string is followed by its Knuth-Morris-Pratt automaton (Knuth, Morris, Pratt, "Fast
pattern matching in strings", 1977). Its state is the length of the longest prefix of the stop
string that the text ends with: exactly what has to be held back, in linear time in every case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from src.core.errors import InvalidRequestError


class StopStrings:
    """Cuts a streamed text at its first stop string and never lets out a part of one.

    Parameters
    ----------
    stops
        The stop strings, none of them empty.
    include_in_output
        Whether the matched stop string stays in the text.
    may_end
        Whether the text may end with these characters behind all that was let out; without it
        always. Where it may not, a stop string is plain text.

    Raises
    ------
    InvalidRequestError
        A stop string is empty.
    """

    def __init__(
        self,
        stops: Sequence[str],
        include_in_output: bool = False,
        may_end: Callable[[str], bool] | None = None,
    ) -> None:
        for i, stop in enumerate(stops):
            if not stop:
                raise InvalidRequestError(
                    f"stop[{i}]: expected a non-empty string, got an empty one", param="stop"
                )
        automata = _automata(tuple(stops))
        self._stops, self._failures = automata.stops, automata.failures
        self._first_characters = automata.first_characters
        self._states = [0] * len(self._stops)
        self._include = include_in_output
        self._may_end = may_end
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, once one did."""

    def feed(self, piece: str, *, allow_match: bool = True) -> tuple[str, str | None]:
        """Take the next piece of the text; return what may be shown and the match, if it came.

        With ``allow_match=False`` a stop string that is completed within ``piece`` passes as plain
        text, while beginnings are still held back, so that one completed later is cut out whole.
        After a match nothing is emitted any more.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._held and self._first_characters.isdisjoint(piece):
            return piece, None
        text = self._held + piece
        states = self._states
        for position, character in enumerate(piece, len(self._held)):
            for i, stop in enumerate(self._stops):
                state = _advance(stop, self._failures[i], states[i], character)
                if state == len(stop):
                    shown = text[: self._end(position + 1, stop)]
                    if allow_match and (self._may_end is None or self._may_end(shown)):
                        self.matched = stop
                        self._held = ""
                        return shown, stop
                    state = self._failures[i][state]
                states[i] = state
        certain = len(text) - max(states)
        self._held = text[certain:]
        return text[:certain], None

    def finish(self) -> str:
        """Return the held-back tail: the text ended without completing a stop string."""
        tail, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return tail

    def _end(self, end: int, stop: str) -> int:
        """Where the text ends that a stop string up to ``end`` cuts."""
        return end if self._include else end - len(stop)


class _Automata(NamedTuple):
    # Longest first: among those that end at one character, the first found is the match.
    stops: list[str]
    failures: list[list[int]]
    first_characters: frozenset[str]


# All completions of a request have the same ones, and they take milliseconds.
@functools.lru_cache(maxsize=16)
def _automata(stops: tuple[str, ...]) -> _Automata:
    ordered = sorted(set(stops), key=lambda stop: (-len(stop), stop))
    failures = [_failure_table(stop) for stop in ordered]
    return _Automata(ordered, failures, frozenset(stop[0] for stop in ordered))


def _advance(stop: str, failure: list[int], state: int, character: str) -> int:
    while state and stop[state] != character:
        state = failure[state]
    return state + 1 if stop[state] == character else 0


def _failure_table(stop: str) -> list[int]:
    """``table[n]``: length of the longest proper prefix of ``stop[:n]`` that also ends it."""
    table = [0, 0]
    for i in range(1, len(stop)):
        table.append(_advance(stop, table, table[i], stop[i]))
    return table
