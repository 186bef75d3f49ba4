"""How many drafts each row gets in a step: as many as are expected to pay, and none is usual.

A draft that the model accepts saves its row a step. One that it rejects has made the step longer
for every row. So a step takes the drafts that are likeliest to be accepted, one after the other, as
long as they bring more tokens per second than the step would give without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

# A draft must be expected to bring this much more than what it costs: both are estimates.
_MARGIN: Final = 1.2
# How much longer drafts of others may make a step for rows that have none.
_NEIGHBOURLY: Final = 1.04
# Factor on the weight of older observations at each new one.
_MEMORY: Final = 0.97
_MIN_STEPS: Final = 4
# Until the price of a draft is known a guess is tried if it is likely to hold.
_UNPRICED: Final = 0.5
# Lengths of a match from which on guesses are counted apart.
FORCED: Final = 1 << 16
"""Length of the match of what is forced: longer than any of a text."""
_MATCHES: Final = (2, 3, 4, 6, 9, 16, FORCED)
# How many of them are assumed to hold before any was seen, and how much that weighs.
_PRIORS: Final = (0.25, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9, 0.85)
_PRIOR_WEIGHT: Final = 4.0
_MOST_OBSERVED: Final = 64.0
# The longest pauses of a row, in steps, after wrong guesses and after no guess.
_LONGEST_PAUSE: Final = 64
_LONGEST_SEARCH: Final = 8
# The same of rows with a grammar: what it forces comes and goes with every few tokens.
_LONGEST_RESTRICTED: Final = 2
# The pause of rows in whose step no guess would pay.
_UNPAID: Final = 16


class Guess(NamedTuple):
    """Guesses of a row's next tokens, and the length of the match that they are from."""

    token_ids: list[int]
    match: int


class _Pause(msgspec.Struct):
    """The step from which on a row is asked again, and the length of its next pause in steps."""

    until: int = 0
    length: int = 1


class Widths:
    """Chooses how many of the guesses of a step's rows are verified.

    Parameters
    ----------
    always
        Verify every guess, whatever it costs; for tests.
    """

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        # Per length of a match: the chance that a guess holds if those before it did, and weight.
        self._chances = [[prior, _PRIOR_WEIGHT] for prior in _PRIORS]
        self._cost = _Line()
        self._pauses: dict[int, _Pause] = {}
        self._step = 0

    def begin(self) -> None:
        """A step begins."""
        self._step += 1

    def vacate(self, row: int) -> None:
        """The row has another request now."""
        self._pauses.pop(row, None)

    def asks(self, row: int) -> bool:
        """Whether a drafter is asked for the row in this step."""
        return self.rests(row) == 0

    def rests(self, row: int) -> int:
        """For how many steps from this one on the row is not asked."""
        pause = self._pauses.get(row)
        return 0 if pause is None or self._always else max(0, pause.until - self._step)

    def none_pays(self, num_tokens: int) -> bool:
        """Whether no guess, however likely, would pay in a step of so many tokens."""
        if self._always or not self._cost.is_known:
            return False
        return num_tokens * self._cost.slope * _MARGIN >= self._cost.at(num_tokens)

    def choose(self, guesses: Sequence[Guess], num_rows: int, num_tokens: int) -> list[int]:
        """How many of each row's guesses are verified.

        Parameters
        ----------
        guesses
            Of the rows that have some.
        num_rows
            Rows that sample in the step.
        num_tokens
            Tokens of the step without drafts.
        """
        if self._always:
            return [len(guess.token_ids) for guess in guesses]
        chances = [self._chances[_kind(guess.match)][0] for guess in guesses]
        # (chance that the row comes that far, row), the likeliest first.
        candidates = sorted(
            (
                (chance ** (place + 1), -index)
                for index, (guess, chance) in enumerate(zip(guesses, chances, strict=True))
                for place in range(len(guess.token_ids))
            ),
            reverse=True,
        )
        widths = [0] * len(guesses)
        given = float(num_rows)
        price = self._cost.slope if self._cost.is_known else None
        most = self._most(len(guesses) < num_rows, num_tokens)
        for taken, (chance, index) in enumerate(candidates):
            if taken >= most:
                break
            if price is None:
                if chance < _UNPRICED:
                    break
            elif chance * self._cost.at(num_tokens + taken) <= _MARGIN * given * price:
                break
            widths[-index] += 1
            given += chance
        return widths

    def _most(self, has_others: bool, num_tokens: int) -> float:
        """The most drafts of a step in which some rows have none."""
        if not has_others:
            return float("inf")
        if not self._cost.is_known:
            return 2.0
        price = self._cost.slope
        return (
            float("inf") if price <= 0 else self._cost.at(num_tokens) * (_NEIGHBOURLY - 1) / price
        )

    def found_nothing(self, row: int, *, restricted: bool = False) -> None:
        """No drafter had an idea for the row, or none that pays; or none that is possible."""
        self._wait(row, _LONGEST_RESTRICTED if restricted else _LONGEST_SEARCH)

    def verified(self, row: int, match: int, verified: int, accepted: int) -> None:
        """So many guesses of a row were verified, and so many were right."""
        entry = self._chances[_kind(match)]
        reached = min(accepted + 1, verified)
        entry[1] = min(entry[1] + reached, _MOST_OBSERVED)
        # The mean of the last observations: each guess that was reached held or did not.
        entry[0] += (accepted - entry[0] * reached) / entry[1]
        entry[0] = min(max(entry[0], 0.02), 0.995)
        if accepted:
            self._pauses.pop(row, None)
        else:
            self._wait(row, _LONGEST_SEARCH if match == FORCED else _LONGEST_PAUSE)

    def _wait(self, row: int, longest: int) -> None:
        pause = self._pauses.setdefault(row, _Pause())
        pause.until = self._step + 1 + min(pause.length, longest)
        pause.length = min(2 * pause.length, _LONGEST_PAUSE)

    def nothing_pays(self, row: int) -> None:
        """No guess would have paid in a step of the row."""
        self._pauses.setdefault(row, _Pause()).until = self._step + 1 + _UNPAID

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step of rows that sample, with their drafts, took so long."""
        self._cost.add(num_tokens, seconds)


def _kind(match: int) -> int:
    return sum(match >= least for least in _MATCHES)


class _Line:
    """Seconds of a step by its tokens, fitted by weighted least squares to the last steps."""

    def __init__(self) -> None:
        self._count = 0
        self._fewest, self._most = 1 << 30, 0
        # Weighted sums of 1, tokens, seconds, tokens squared, and tokens times seconds.
        self._ones = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        seconds = max(seconds, 1e-6)
        weight = 1.0 / seconds
        self._count += 1
        self._fewest, self._most = min(self._fewest, tokens), max(self._most, tokens)
        self._ones = _MEMORY * self._ones + weight
        self._tokens = _MEMORY * self._tokens + weight * tokens
        self._seconds = _MEMORY * self._seconds + weight * seconds
        self._squares = _MEMORY * self._squares + weight * tokens * tokens
        self._products = _MEMORY * self._products + weight * tokens * seconds

    @property
    def _spread(self) -> float:
        mean = self._tokens / self._ones
        return self._squares / self._ones - mean * mean

    @property
    def is_known(self) -> bool:
        """Whether enough steps of different sizes were seen to tell what a token costs."""
        return self._count >= _MIN_STEPS and self._spread > 0.05

    @property
    def slope(self) -> float:
        """Seconds per token; 0 if unknown."""
        if not self.is_known:
            return 0.0
        mean_tokens, mean_seconds = self._tokens / self._ones, self._seconds / self._ones
        together = self._products / self._ones - mean_tokens * mean_seconds
        return max(0.0, together / self._spread)

    def at(self, tokens: int) -> float:
        mean_tokens, mean_seconds = self._tokens / self._ones, self._seconds / self._ones
        return max(1e-6, mean_seconds + self.slope * (tokens - mean_tokens))
