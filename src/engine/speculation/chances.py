"""How likely guesses are to hold: measured by their source, their match, and their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from src.engine.speculation.guess import FORCED, Guess

# Lengths of a match, and places among a row's guesses, from which on guesses are counted apart.
_MATCHES: Final = (2, 3, 4, 6, 9, 16)
_PLACES: Final = (1, 2, 4, 8)
# How many guesses are assumed to hold before any was seen, by match, and how much that weighs.
_PRIORS: Final = (0.25, 0.4, 0.55, 0.7, 0.8, 0.85, 0.9)
_PRIORS_OF: Final[Mapping[str, Sequence[float]]] = MappingProxyType(
    # A client that sends a prediction has reason to expect it.
    {"prediction": (0.7, 0.7, 0.7, 0.75, 0.8, 0.85, 0.9), FORCED: (0.85,) * 7}
)
_PRIOR_WEIGHT: Final = 4.0
_MOST_OBSERVED: Final = 64.0
_LEAST_CHANCE: Final = 0.02
_MOST_CHANCE: Final = 0.995
# After so many steps without an observation what was observed is forgotten: texts have changed.
_FORGOTTEN: Final = 4096
# A row has at most so many drafts.
_MOST_DRAFTS: Final = 64


class _Chance(msgspec.Struct):
    """A moving mean of guesses that held, its weight, and the step of its last observation."""

    mean: float
    weight: float = _PRIOR_WEIGHT
    seen: int = 0


class Chances:
    """The chance that a guess holds if those before it did."""

    def __init__(self) -> None:
        # Source -> [length of the match][place]
        self._tables: dict[str, list[list[_Chance]]] = {}
        self._step = 0

    def begin(self, steps: int = 1) -> None:
        """A step begins; ``steps``: with it so many have begun since the last call."""
        self._step += steps

    def forget(self, source: str) -> None:
        """Nothing was observed of a source, as far as is known."""
        self._tables.pop(source, None)

    def first(self, guess: Guess) -> float:
        """The chance of the first token of a guess."""
        return self._mean(self._line(guess.source, guess.match)[0], guess)

    def survivals(self, guess: Guess) -> list[float]:
        """Per token of a guess: the chance that it and all before it hold. It never increases."""
        line = self._line(guess.source, guess.match)
        means = [self._mean(chance, guess) for chance in line]
        survival, found = 1.0, []
        for kind in _KIND_OF_PLACE[: len(guess.token_ids)]:
            survival *= means[kind]
            found.append(survival)
        return found

    def verified(self, guess: Guess, accepted: int) -> None:
        """All tokens of a guess were verified, and so many were right."""
        line = self._line(guess.source, guess.match)
        for place in range(min(accepted + 1, len(guess.token_ids))):
            chance = line[_at(_PLACES, place)]
            self._mean(chance, guess)
            chance.seen = self._step
            chance.weight = min(chance.weight + 1, _MOST_OBSERVED)
            mean = chance.mean + ((place < accepted) - chance.mean) / chance.weight
            chance.mean = min(max(mean, _LEAST_CHANCE), _MOST_CHANCE)

    def _mean(self, chance: _Chance, guess: Guess) -> float:
        if self._step - chance.seen > _FORGOTTEN:
            chance.mean, chance.weight = _prior(guess.source, guess.match), _PRIOR_WEIGHT
            chance.seen = self._step
        return chance.mean

    def _line(self, source: str, match: int) -> list[_Chance]:
        table = self._tables.get(source)
        if table is None:
            table = self._tables[source] = [
                [_Chance(prior) for _ in range(len(_PLACES) + 1)]
                for prior in _PRIORS_OF.get(source, _PRIORS)
            ]
        return table[_at(_MATCHES, match)]


def _prior(source: str, match: int) -> float:
    return _PRIORS_OF.get(source, _PRIORS)[_at(_MATCHES, match)]


def _at(bounds: Sequence[int], number: int) -> int:
    return sum([number >= bound for bound in bounds])


_KIND_OF_PLACE: Final = tuple(_at(_PLACES, place) for place in range(_MOST_DRAFTS))
