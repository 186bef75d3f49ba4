"""What drafts cost: how much longer they make a step, measured while serving."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

# Numbers of tokens, and of drafts, from which on steps are counted apart.
_TOKENS: Final = (2, 3, 5, 9, 17, 33, 65, 129)
_DRAFTS: Final = (2, 4, 8, 16, 32, 64)
# How fast the usual duration of steps without drafts follows the last ones.
_FRESH: Final = 0.2
# After so many steps the duration is of other lengths of texts, and is measured again.
_STALE: Final = 64
_FORGOTTEN: Final = 1024
# How much the assumed price weighs, in drafts, and how many of the last steps make a price. A step
# with many drafts tells more of what each costs: whatever else made it longer is divided by them.
_PRIOR_WEIGHT: Final = 8.0
_MOST_OBSERVED: Final = 48
# A price that was measured fewer times is believed to be no higher than that of fewer drafts: what
# was assumed, or one disturbed step, must not keep it from being measured.
_KNOWN: Final = 8
# What was measured so many steps ago weighs no more than so many steps of today: a machine that was
# busy then may be quiet now, and where drafts did not seem to pay few are tried.
_LONG_AGO: Final = 64
_WEIGHT_OF_OLD: Final = 3
# What was measured so many steps ago is believed no more than what was hardly measured: a dear
# price of many drafts would never be measured again while fewer pay.
_DOUBTED: Final = 512
# The least price that is believed, as a part of the assumed one: no draft is free, and clocks of a
# busy machine say anything.
_LEAST_PART: Final = 0.15


class _Base(msgspec.Struct):
    """The usual seconds of a step without drafts, and the step in which that was last seen."""

    seconds: float
    seen: int


class _Price(msgspec.Struct):
    """How much longer a draft makes a step, as a part of that step without any, and its weight.

    ``weight`` is in drafts, ``times`` how often it was measured, ``last`` what was found last, and
    ``seen`` in which step.
    """

    mean: float
    weight: float = _PRIOR_WEIGHT
    times: int = 0
    last: float = 0.0
    seen: int = 0


class MeasuredPrice(NamedTuple):
    """The price of a draft in steps of as many tokens, and with as many drafts.

    Attributes
    ----------
    tokens, drafts
        The least and the most of both that these steps have; ``None``: any number.
    price
        How much longer each draft makes the step, as a part of its duration without any.
    steps
        How many steps it is made of, the last ones.
    """

    tokens: tuple[int, int | None]
    drafts: tuple[int, int | None]
    price: float
    steps: int


class Costs:
    """How much longer drafts make a step of ``certain`` tokens that is computed anyway.

    Durations drift, because texts grow and machines are shared. So a step with drafts is compared
    with the last ones without that had as many other tokens, and what is kept is the ratio.

    Before anything was measured a draft is assumed to cost a token's part of a step that would take
    4 tokens longer than it has.
    """

    def __init__(self) -> None:
        self._bases: dict[int, _Base] = {}
        self._prices: dict[tuple[int, int], _Price] = {}
        # certain -> `least_price` and `is_priced`, until a price changes: every step asks for them.
        self._least: dict[int, float] = {}
        self._priced: dict[int, bool] = {}
        self._step = 0

    def begin(self, steps: int = 1) -> None:
        """A step begins; ``steps``: with it so many have begun since the last call."""
        self._step += steps

    def is_measured(self, certain: int) -> bool:
        """Whether it is known how long such a step takes without drafts at the moment."""
        base = self._bases.get(certain)
        return base is not None and self._step - base.seen <= _STALE

    def usual(self, certain: int) -> float:
        """Seconds of such a step without drafts; 0 if there was none."""
        base = self._bases.get(certain)
        return 0.0 if base is None else base.seconds

    @property
    def usual_seconds(self) -> dict[int, float]:
        """Tokens of a step -> its usual seconds without drafts. Any thread may ask."""
        return {certain: base.seconds for certain, base in sorted(self._bases.copy().items())}

    @property
    def measured(self) -> list[MeasuredPrice]:
        """All prices that were measured. Any thread may ask."""
        return [
            MeasuredPrice(
                _within(_TOKENS, kind),
                _within(_DRAFTS, size),
                price.mean,
                price.times,
            )
            for (kind, size), price in sorted(self._prices.copy().items())
        ]

    def took(self, certain: int, drafts: int, seconds: float) -> None:
        """A step took so long."""
        base = self._bases.get(certain)
        if not drafts:
            if base is None or self._step - base.seen > _FORGOTTEN:
                self._bases[certain] = _Base(seconds, self._step)
                return
            # A step that was disturbed says little.
            seconds = min(seconds, 2 * base.seconds)
            base.seconds += _FRESH * (seconds - base.seconds)
            base.seen = self._step
        elif base is not None and base.seconds > 0:
            price = self._prices.setdefault(*self._cell(certain, drafts))
            found = (min(seconds / base.seconds, 1 + 2 * drafts) - 1) / drafts
            if self._step - price.seen > _LONG_AGO:
                price.weight = min(price.weight, _WEIGHT_OF_OLD * drafts)
            price.last, price.seen, price.times = found, self._step, price.times + 1
            price.weight = min(price.weight + drafts, _MOST_OBSERVED * drafts)
            price.mean += (found - price.mean) * drafts / price.weight
            self._least.clear()
            self._priced.clear()

    def is_priced(self, certain: int) -> bool:
        """Whether it was ever measured what drafts cost in such a step."""
        priced = self._priced.get(certain)
        if priced is None:
            kind = kind_of(certain)
            priced = any((kind, size) in self._prices for size in range(len(_DRAFTS) + 1))
            self._priced[certain] = priced
        return priced

    def price(self, certain: int, drafts: int, *, as_seen: bool = False) -> float:
        """How much longer each of so many drafts makes the step, as a part of its duration.

        ``as_seen``: as much as it was the last time, though that may have been a disturbed step.
        """
        kind, size = kind_of(certain), _at(_DRAFTS, drafts)
        price = self._prices.get((kind, size))
        if price is not None and as_seen and self._step - price.seen <= _DOUBTED:
            mean = max(price.mean, price.last)
        elif price is not None and self._is_known(price):
            mean = price.mean
        else:
            fewer = self._of_fewer(kind, size)
            known = [each.mean for each in (price, fewer) if each is not None]
            mean = min(known, default=_assumed(certain))
        return max(mean, _LEAST_PART * _assumed(certain))

    def _is_known(self, price: _Price) -> bool:
        return price.times >= _KNOWN and self._step - price.seen <= _DOUBTED

    def prices(self, certain: int, most: int, *, as_seen: bool = False) -> list[float]:
        """Those of 1 to ``most`` drafts; see `price`."""
        found: list[float] = []
        for bound, end in pairwise((1, *_DRAFTS, most + 1)):
            price = self.price(certain, bound, as_seen=as_seen)
            found += [price] * (min(end, most + 1) - bound)
        return found

    def least_price(self, certain: int) -> float:
        """The price of a draft if there are as many as are cheapest."""
        least = self._least.get(certain)
        if least is None:
            least = min(self.price(certain, drafts) for drafts in (1, *_DRAFTS))
            self._least[certain] = least
        return least

    def _of_fewer(self, kind: int, size: int) -> _Price | None:
        """The price of fewer drafts in such steps, the nearest one that was measured."""
        for fewer in range(size - 1, -1, -1):
            if (price := self._prices.get((kind, fewer))) is not None:
                return price
        return None

    def _cell(self, certain: int, drafts: int) -> tuple[tuple[int, int], _Price]:
        """Where such steps are counted, and what is assumed before any was."""
        kind, size = kind_of(certain), _at(_DRAFTS, drafts)
        # Fewer drafts, of which something is known, tell more than nothing.
        fewer = self._of_fewer(kind, size)
        return (kind, size), _Price(_assumed(certain) if fewer is None else fewer.mean)


def kind_of(certain: int) -> int:
    """Which steps are counted with those that have so many tokens without drafts."""
    return _at(_TOKENS, certain)


def _assumed(certain: int) -> float:
    return 1 / (certain + 4)


def _at(bounds: Sequence[int], number: int) -> int:
    return sum([number >= bound for bound in bounds])


def _within(bounds: Sequence[int], at: int) -> tuple[int, int | None]:
    """The least and the most of the numbers that are counted there."""
    return (1, *bounds)[at], bounds[at] - 1 if at < len(bounds) else None
