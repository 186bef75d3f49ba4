"""When likely guesses are tried although they are not expected to pay, and how many of them."""

from __future__ import annotations

from typing import Final

# Once in so many steps, and more seldom where that was seen to lose more than a part of the time.
_STEPS: Final = 128
_LOST: Final = 0.005
# Of one try no more steps than that are believed to be lost.
_MOST_BELIEVED: Final = 4.0
# So many guesses in turns: prices are kept by the number of drafts, and each of many may be cheap
# where one is not. ``None``: as many as a try may have.
_NUMBERS: Final = (1, None, 2, None)


class Probes:
    """Tries, and what they have lost in steps of as many tokens.

    A try loses what it makes its step longer, less the drafts that were right.
    """

    def __init__(self) -> None:
        self._step = 0
        self._last = 0
        self._count = 0
        # Kind of step -> steps that the last two tries have lost. The lesser one counts, so that
        # one that was disturbed does not keep others from finding out that all is well.
        self._losses: dict[int, tuple[float, float]] = {}
        # In the step of a try: its drafts that were right.
        self._right: int | None = None

    def begin(self, steps: int) -> None:
        """A step begins; ``steps``: with it so many have begun since the last call."""
        self._step += steps
        self._right = None

    def is_due(self, kind: int) -> bool:
        """Whether guesses may be tried in a step of this kind."""
        lost = min(self._losses.get(kind, (0.0, 0.0)))
        return self._step - self._last >= max(_STEPS, lost / _LOST)

    def start(self) -> int | None:
        """How many guesses are tried in this step; ``None``: as many as a try may have."""
        number = _NUMBERS[self._count % len(_NUMBERS)]
        self._last, self._right = self._step, 0
        self._count += 1
        return number

    def verified(self, accepted: int) -> None:
        """So many drafts of a row were right."""
        if self._right is not None:
            self._right += accepted

    def took(self, kind: int, longer: float, num_rows: int) -> None:
        """A step of so many rows, with drafts, was longer by this part of what it takes without.

        If it was a try, and is still the last step that has begun.
        """
        if self._right is None:
            return
        lost = min(max(0.0, longer - self._right / num_rows), _MOST_BELIEVED)
        self._right = None
        self._losses[kind] = self._losses.get(kind, (0.0, 0.0))[1], lost
