"""How many drafts each row gets in a step: as many as are expected to pay, and none is usual.

A draft that the model accepts saves its row a step. One that it rejects has made the step longer
for every row. So a step takes the drafts that are likeliest to be accepted, as many of them as give
the most tokens per second, if that is more than the step would give without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from src.engine.speculation.balances import Balances
from src.engine.speculation.chances import Chances
from src.engine.speculation.costs import Costs, kind_of
from src.engine.speculation.guess import FORCED, Guess
from src.engine.speculation.probes import Probes

# Drafts must be expected to bring this much more than what they cost: both are estimates.
_MARGIN: Final = 1.2
# In steps in which a sure draft was seen to cost more than this part of what it brings, nobody is
# asked. Planning for drafts and looking for them take time as well, and most guesses are not sure.
_WORTH: Final = 0.6
# Tokens over a step's duration to this power are the measure of what drafts bring: a step twice as
# long must bring a little more than twice the tokens. Otherwise drafts that hardly pay make steps
# several times as long, for nothing.
_CALM: Final = 1.1
# With newcomers it is the square. Then their mean wait for a step's end, over all the time in which
# others decode, is no longer than without drafts: that time gets shorter by as much as steps get
# longer. They are expected if one of as many steps had some; how fast that follows the last steps.
_HASTY: Final = 2.0
_STEPS_BETWEEN: Final = 64
_STEPS_KNOWN: Final = 256
# A guess that is tried where none is expected to pay is at least so likely.
_LIKELY: Final = 0.6
# Many are tried if they are expected to lose no more than the time of a step, and to make this one
# no longer than that of four. Nearly sure ones lose little: what costs as much as a token brings a
# token.
_LOST: Final = 1.0
_LONGEST_PROBE: Final = 4.0
# Where all rows have as many, each has at most so many.
_WIDTH_OF_PROBES: Final = 2
# The longest pauses of a row, in steps: after wrong guesses, and at least after no guess.
_LONGEST_PAUSE: Final = 64
_LONGEST_SEARCH: Final = 8
# The part of a step's time that asking in vain may take, spread over the steps of a pause.
_ASKING: Final = 0.005
_FRESH: Final = 0.1
# The longest pause of rows with a grammar, while asking for them pays: what it forces comes and
# goes with every few tokens.
_LONGEST_RESTRICTED: Final = 2
# Of steps without drafts one in so many is measured.
_MEASURED: Final = 8
# The same while nobody is asked or looked at: measuring takes time as well.
_MEASURED_IDLE: Final = 64
# Not in steps in which pauses end: those are multiples of powers of two.
_MEASURED_AT: Final = 5
# The shortest pause of rows in whose step no guess would pay.
_UNPAID: Final = 16


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

    Attributes
    ----------
    has_held_back
        Whether more guesses would have paid in the last step that had some, but for rows without.
    """

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._chances = Chances()
        self._costs = Costs()
        self._balances = Balances()
        self._pauses: dict[int, _Pause] = {}
        self._step = 0
        self._probes = Probes()
        # No pause ends before this step.
        self._soonest = 0
        # Whether nothing is expected to pay in this step, and it only tries guesses.
        self._only_tries = False
        # Seconds that asking takes in a step, as a part of the usual one.
        self._asking = 0.0
        # The part of the last steps for whose end a newcomer has waited.
        self._awaited = 0.0
        self.has_held_back = False

    @property
    def always(self) -> bool:
        """Whether every guess is verified."""
        return self._always

    @property
    def costs(self) -> Costs:
        """What drafts cost, as measured."""
        return self._costs

    def begin(self, steps: int = 1) -> None:
        """A step begins; ``steps``: with it so many have begun since the last call."""
        self._step += steps
        self._chances.begin(steps)
        self._costs.begin(steps)
        self._balances.begin(steps)
        self._probes.begin(steps)
        self._awaited *= (1 - 1 / _STEPS_KNOWN) ** steps

    @property
    def idle_steps(self) -> int:
        """In how many steps behind this one no pause ends, and none is to be measured."""
        if self._always:
            return 0
        until_measured = (_MEASURED_AT - self._step - 1) % _MEASURED_IDLE
        return max(0, min(until_measured, self._soonest - self._step - 1))

    def joined(self) -> None:
        """A newcomer has waited for the end of the step before, which may have had drafts."""
        # More than that changes nothing, and would take long to be forgotten.
        self._awaited = min(1 / _STEPS_BETWEEN, self._awaited + 1 / _STEPS_KNOWN)

    def _power(self, num_tokens: int) -> float:
        """Tokens over the duration of such a step to this power are the measure."""
        if not self._costs.is_priced(num_tokens):
            # What it costs is found out by trying.
            return _CALM
        return min(_HASTY, _CALM + (_HASTY - _CALM) * _STEPS_BETWEEN * self._awaited)

    def vacate(self, row: int) -> None:
        """The row has another request now."""
        self._pauses.pop(row, None)
        self._balances.vacate(row)

    def asks(self, row: int) -> bool:
        """Whether a drafter is asked for the row in this step."""
        return self.rests(row) == 0

    def rests(self, row: int) -> int:
        """For how many steps from this one on the row is not asked."""
        pause = self._pauses.get(row)
        return 0 if pause is None or self._always else max(0, pause.until - self._step)

    def asks_any(self) -> bool:
        """Whether the pause of some row may have ended."""
        if self._step < self._soonest:
            return False
        ends = [pause.until for pause in self._pauses.values() if pause.until > self._step]
        self._soonest = min(ends, default=self._step + _LONGEST_PAUSE)
        return True

    def asks_again(self) -> None:
        """Rows whose pause has ended were passed over in this step."""
        self._soonest = self._step + 1

    def may_draft(self, num_tokens: int, *, joins: bool = False) -> bool:
        """Whether a step of so many tokens may have drafts: their price needs one without.

        ``joins``: a request joins the others with it, and pays for no draft of theirs.
        """
        return self._always or (not joins and self._costs.is_measured(num_tokens))

    def none_pays(self, num_tokens: int) -> bool:
        """Whether no guess, however likely, would be worth its work in a step of so many tokens."""
        self._only_tries = False
        worth = _WORTH if self._costs.is_priced(num_tokens) else 1 / _MARGIN
        price = num_tokens * self._costs.least_price(num_tokens)
        if self._always or price * self._power(num_tokens) < worth * _CALM:
            return False
        self._only_tries = self._probes.is_due(kind_of(num_tokens))
        return not self._only_tries

    def likelihood(self, guess: Guess) -> float:
        """The chance that the first token of a guess holds."""
        return self._chances.first(guess)

    def may_pay(self, guess: Guess, num_tokens: int) -> bool:
        """Whether a guess may pay in a step of so many tokens, as far as is known."""
        likelihood = self.likelihood(guess)
        price = num_tokens * self._costs.least_price(num_tokens)
        if likelihood > price * _MARGIN * self._power(num_tokens):
            return True
        return self._always or (likelihood >= _LIKELY and self._probes.is_due(kind_of(num_tokens)))

    def choose(
        self,
        guesses: Sequence[Guess],
        num_rows: int,
        num_tokens: int,
        again: Sequence[int] | None = None,
        *,
        others: Sequence[int] = (),
    ) -> list[int]:
        """How many of each row's guesses are verified.

        Parameters
        ----------
        guesses
            Of the rows that have some.
        num_rows
            Rows that sample in the step.
        num_tokens
            Tokens of the step without drafts.
        again
            Of the rows that have guesses: tokens that are computed again, beside right drafts, if a
            draft of the row is wrong. ``None``: nothing ever is.
        others
            The rows that sample and have none, as far as they are known.
        """
        if self._always:
            return [len(guess.token_ids) for guess in guesses]
        # (chance that the row comes that far, row, tokens it takes), the likeliest first.
        candidates = sorted(
            (
                (survival, -index, taken)
                for index, guess in enumerate(guesses)
                for survival, taken in self._taken(guess, None if again is None else again[index])
            ),
            reverse=True,
        )
        widths = [0] * len(guesses)
        lacking = num_rows - len(guesses)
        most = self._balances.bearable(others, lacking, num_rows)
        count = self._count(candidates, lacking, most, num_rows, num_tokens)
        for _, index, _ in candidates[:count]:
            widths[-index] += 1
        return widths

    def charge(self, rows: Sequence[int], num_tokens: int, drafts: int) -> None:
        """A step of these rows, with so many tokens without drafts, has so many of them."""
        if drafts and not self._always:
            self._balances.lost(rows, drafts * self._costs.price(num_tokens, drafts))

    def choose_width(
        self,
        guesses: Sequence[Guess],
        num_rows: int,
        num_tokens: int,
        widths: Sequence[int],
    ) -> int:
        """The same where a step takes as long as if each of its rows had as many: how many.

        Parameters
        ----------
        widths
            Numbers of drafts that a row may have in such a step, ascending.
        """
        longest = max(len(guess.token_ids) for guess in guesses)
        if self._always or not longest:
            return longest
        chances = [self._chances.survivals(guess) for guess in guesses]
        most = self._balances.bearable((), num_rows - len(guesses), num_rows)
        best, best_rate, power = 0, float(num_rows), self._power(num_tokens)
        for width in widths:
            drafts = num_rows * width
            longer = drafts * self._costs.price(num_tokens, drafts)
            if longer > most:
                continue
            expected = sum(sum(each[:width]) for each in chances)
            rate = self._rate(num_rows, expected, longer, power)
            if rate > best_rate:
                best, best_rate = width, rate
            if width >= longest:
                break
        likeliest = max(each[0] for each in chances if each)
        if not best and likeliest >= _LIKELY and self._probes.is_due(kind_of(num_tokens)):
            self._probes.start()
            return max((width for width in widths if width <= _WIDTH_OF_PROBES), default=0)
        return best

    @staticmethod
    def _rate(num_rows: int, expected: float, longer: float, power: float) -> float:
        """What so many drafts that hold make of a step that is so much longer; 0: they do not pay.

        How many tokens in a time, or ``num_rows`` without drafts.
        """
        slower: float = (1 + longer) ** power
        if expected < _MARGIN * num_rows * (slower - 1):
            return 0.0
        return (num_rows + expected) / slower

    def _taken(self, guess: Guess, again: int | None) -> list[tuple[float, float]]:
        """Per token of a guess: the chance that the row comes that far, and tokens that it takes.

        That is itself, and what is expected to be computed again because it is the first wrong one.
        """
        survivals = self._chances.survivals(guess)
        if again is None:
            return [(survival, 1.0) for survival in survivals]
        before = [1.0, *survivals]
        return [
            (survival, 1 + (again + place) * (before[place] - survival))
            for place, survival in enumerate(survivals)
        ]

    def _count(
        self,
        candidates: Sequence[tuple[float, int, float]],
        lacking: int,
        most: float,
        num_rows: int,
        num_tokens: int,
    ) -> int:
        """How many of the likeliest drafts give the most tokens per second.

        They make the step longer by ``most`` of it, so that ``lacking`` rows do not lose too much.
        """
        prices = self._costs.prices(num_tokens, len(candidates))
        self.has_held_back = False
        best, best_rate, power = 0, float(num_rows), self._power(num_tokens)
        expected = tokens = 0.0
        for count, ((survival, _, taken), price) in enumerate(
            zip(candidates, prices, strict=True), 1
        ):
            expected += survival
            tokens += taken
            longer = tokens * price
            rate = self._rate(num_rows, expected, longer, power)
            if rate <= best_rate:
                continue
            if longer > most:
                # More of them may be cheaper together, as far as was measured.
                self.has_held_back = True
                continue
            best, best_rate = count, rate
        if best or not candidates or candidates[0][0] < _LIKELY:
            return best
        if not self._probes.is_due(kind_of(num_tokens)):
            return 0
        number = self._probes.start()
        if number is None:
            return self._affordable(candidates, lacking, num_rows, num_tokens)
        return min(number, len(candidates))

    def _affordable(
        self,
        candidates: Sequence[tuple[float, int, float]],
        lacking: int,
        num_rows: int,
        num_tokens: int,
    ) -> int:
        """How many of the likeliest drafts are tried together: at least one."""
        prices = self._costs.prices(num_tokens, len(candidates), as_seen=True)
        power = self._power(num_tokens) / _CALM
        most, brought, tokens = 1, 0.0, 0.0
        for count, ((survival, _, taken), price) in enumerate(
            zip(candidates, prices, strict=True), 1
        ):
            # Rows that have none lose all of the time.
            brought += 0.0 if lacking else survival / num_rows
            tokens += taken
            duration = 1 + tokens * price
            if duration <= _LONGEST_PROBE and duration**power - 1 - brought <= _LOST:
                most = count
        return most

    def forget(self, source: str) -> None:
        """What is known of somebody's guesses is of other texts, and is measured again."""
        self._chances.forget(source)

    def found_nothing(
        self, row: int, *, restricted: bool = False, costs_more: bool = False
    ) -> None:
        """No drafter had an idea for the row, or none that pays; or none that is possible.

        ``costs_more``: asking for restricted rows costs more than it saves.
        """
        if self._only_tries:
            self.nothing_pays(row)
            return
        if restricted and not costs_more:
            self._wait(row, _LONGEST_RESTRICTED)
            return
        longest = _LONGEST_SEARCH
        # In small steps of a small model asking takes long.
        while longest < _LONGEST_PAUSE and longest * _ASKING < self._asking:
            longest *= 2
        least = longest if restricted else longest // 2 if longest > _LONGEST_SEARCH else 1
        self._wait(row, longest, least)

    def longer(self, num_tokens: int, seconds: float) -> float:
        """How much longer such a step took than it does without drafts, as a part of that."""
        usual = self._costs.usual(num_tokens)
        return seconds / usual - 1 if usual > 0 else 0.0

    def asked(self, num_tokens: int, seconds: float) -> None:
        """Asking for all rows of a step of so many tokens has taken so long."""
        if (usual := self._costs.usual(num_tokens)) > 0:
            self._asking += _FRESH * (min(1.0, seconds / usual) - self._asking)

    def verified(self, row: int, guess: Guess, accepted: int) -> None:
        """A row's guess was verified, and so many of its tokens were right."""
        self._chances.verified(guess, accepted)
        self._balances.gained(row, accepted)
        self._probes.verified(accepted)
        if accepted:
            self._pauses.pop(row, None)
        else:
            self._wait(row, _LONGEST_SEARCH if guess.source == FORCED else _LONGEST_PAUSE)

    def held_back(self, row: int) -> None:
        """A row's guess would have paid, but for rows without: soon these may have some as well.

        If that was in vain several times, it is asked as seldom as where nothing pays.
        """
        pause = self._pauses.get(row)
        if pause is None or pause.length <= _LONGEST_SEARCH:
            self.found_nothing(row)
        else:
            self.nothing_pays(row)

    def _wait(self, row: int, longest: int, least: int = 1) -> None:
        pause = self._pauses.setdefault(row, _Pause())
        pause.length = max(pause.length, least)
        self._pause(pause, min(pause.length, longest))
        pause.length = min(2 * pause.length, _LONGEST_PAUSE)

    def nothing_pays(self, row: int) -> None:
        """No guess would have paid in a step of the row."""
        self._wait(row, _LONGEST_PAUSE, _UNPAID)

    def _pause(self, pause: _Pause, length: int) -> None:
        # Up to a multiple of its length, so that rows are asked in the same steps. All others are
        # then planned and computed as they are without speculation.
        pause.until = (self._step + 1 + length) // length * length
        self._soonest = min(self._soonest, pause.until)

    def is_fresh(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens without drafts need not be measured this time."""
        return self._step % _MEASURED != _MEASURED_AT and self._costs.is_measured(num_tokens)

    def took(self, num_tokens: int, drafts: int, seconds: float) -> None:
        """A step of rows that sample took so long: so many tokens, some of which are drafts."""
        certain = num_tokens - drafts
        if drafts:
            self._probes.took(kind_of(certain), self.longer(certain, seconds), certain)
        self._costs.took(certain, drafts, seconds)
