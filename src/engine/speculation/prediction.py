"""Guesses that an output is the text that its client has predicted."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from src.core.step_message import DeviceRequest
from src.engine.speculation.guess import Guess
from src.engine.speculation.places import places_of

# Tokens of an output's end by which its place in the prediction is found again.
_LEAST: Final = 2
_LONGEST: Final = 24
# How far before and behind the expected place it is looked for.
_BEFORE: Final = 2048
_BEHIND: Final = 8192


class _Followed(msgspec.Struct):
    """The prediction of a row's request, and how far its output has come in it.

    Attributes
    ----------
    text
        [n] int32: the prediction.
    known
        How many of the row's tokens were looked at.
    place
        Index in ``text`` of the token that is expected next.
    agreed
        How many tokens before it have agreed; 0: the output has left the prediction.
    """

    text: np.ndarray
    known: int
    place: int = 0
    agreed: int = 1


class Predicted:
    """Follows the prediction of each row's request ("predicted outputs", as OpenAI calls them).

    Where an output leaves its prediction, it is looked for again by its last tokens, near the place
    where it left. So a prediction serves from its beginning, and again behind each change.
    """

    reads_texts = False

    def __init__(self) -> None:
        self._rows: dict[int, _Followed] = {}

    def install(self, row: int, request: DeviceRequest) -> None:
        """The row has this request now, or has it again."""
        self._rows.pop(row, None)
        if request.prediction:
            text = np.frombuffer(request.prediction, np.int32)
            self._rows[row] = _Followed(text, request.prompt_len)

    def leave(self, row: int, request: DeviceRequest, tokens: np.ndarray) -> None:
        """The row's request has ended."""
        self._rows.pop(row, None)

    def may_guess(self, row: int, tokens: np.ndarray) -> bool:
        """See `Screening`."""
        return row in self._rows

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        """See `Drafter`."""
        followed = self._rows.get(row)
        if followed is None:
            return None
        self._advance(followed, tokens)
        if not followed.agreed:
            return None
        place = followed.place
        found: list[int] = followed.text[place : place + most].tolist()
        return Guess(found, followed.agreed, "prediction") if found else None

    def _advance(self, followed: _Followed, tokens: np.ndarray) -> None:
        """Go on by the tokens that the row has got."""
        new, place = tokens[followed.known :], followed.place
        followed.known = len(tokens)
        if not len(new):
            return
        expected = followed.text[place : place + len(new)]
        if followed.agreed and np.array_equal(expected, new):
            followed.place += len(new)
            followed.agreed += len(new)
            return
        if len(new) > _BEHIND:
            # Behind a preemption nothing is known of where the output was. It has come about as far
            # in its prediction as it is long.
            place += len(new)
        begin = max(0, place - _BEFORE)
        text = followed.text[begin : place + _BEHIND]
        places, length = places_of(text, tokens[-_LONGEST:], _LEAST, _LONGEST)
        followed.agreed = length
        if length:
            places = places + begin
            # The nearest one behind the place where it left, or else the last one before.
            at = min(int(np.searchsorted(places, place)), len(places) - 1)
            followed.place = int(places[at])
