"""Whether a drafter that computes is worth its work, or rests."""

from __future__ import annotations

from typing import Final

# It rests after so many steps in which less than one token in so many was a right guess of it.
_WINDOW: Final = 512
_TOKENS_PER_GUESS: Final = 50
# For how many steps it rests, at first and at most, before it is tried again.
_SHORTEST: Final = 512
_LONGEST: Final = 4096
# It is tried sooner where so many steps had at most half as many rows as those before its rest.
_FEWER: Final = 64


class Effort:
    """When a drafter rests that computes, and costs something also where no guess is taken.

    It reads every token of every row, so that its guesses are good when they are wanted. Where
    drafts do not pay, or are wrong, this is time for nothing. So it rests for a time, which doubles
    up to 4096 steps, and is tried for 512 steps behind each.

    Attributes
    ----------
    rests
        Whether it rests in this step.
    """

    def __init__(self) -> None:
        self.rests = False
        self._left = _WINDOW
        self._length = _SHORTEST
        # Of the window: tokens that were sampled, and right guesses.
        self._tokens = 0
        self._right = 0
        # Rows of a step before it rested, and steps in turn that had at most half of them.
        self._usual = 0.0
        self._fewer = 0

    def begin(self, num_rows: int) -> None:
        """A step of so many rows begins."""
        self._left -= 1
        if self.rests:
            self._fewer = self._fewer + 1 if 2 * num_rows <= self._usual else 0
            if self._left <= 0 or self._fewer >= _FEWER:
                self._try()
            return
        self._tokens += num_rows
        if self._left > 0:
            return
        if self._right * _TOKENS_PER_GUESS >= self._tokens:
            self._length = _SHORTEST
            self._try()
            return
        self.rests = True
        self._usual, self._fewer = self._tokens / _WINDOW, 0
        self._left = self._length
        self._length = min(2 * self._length, _LONGEST)

    def verified(self, accepted: int) -> None:
        """A guess of it was verified, and so many of its tokens were right."""
        self._right += accepted

    def _try(self) -> None:
        self.rests = False
        self._left = _WINDOW
        self._tokens = self._right = 0
