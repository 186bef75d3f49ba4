"""Asks the drafters of an engine for guesses of what its rows say next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from src.core.plan import RowStep, StepPlan
from src.core.step_message import DeviceRequest
from src.engine.grammar.look_ahead import Wanted
from src.engine.speculation.drafter import (
    SURE,
    BatchDrafter,
    Drafter,
    Follower,
    Lagging,
    Screening,
)
from src.engine.speculation.guess import FORCED, Guess
from src.engine.speculation.history import SharedHistory
from src.engine.speculation.lookup import RestrictedLookup
from src.engine.speculation.resting_rows import RestingRows
from src.engine.speculation.widths import Widths

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# A guess that is likelier is taken without asking others.
_LIKELY_ENOUGH: Final = 0.7
# How long a step looks for guesses of rows that rest.
_LOOKING_SECONDS: Final = 1e-3
# What asking for restricted rows saves at first, in steps; how fast that follows the last times;
# and how much longer it makes a step at most: a disturbed step says little.
_SAVED_AT_FIRST: Final = 1.0
_FRESH: Final = 0.1
_MOST_LONGER: Final = 1.5


class Restrictions(Protocol):
    """What bounds the choice of rows beside their parameters: grammars, and budgets of thinking."""

    def leaves_free(self, row: int, position: int) -> bool:
        """Whether nothing restricts the row's tokens up to this position."""
        ...

    def never_drafts(self, row: int) -> bool:
        """Whether none of the row's guesses will be possible any more."""
        ...

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Of each of these rows, the guesses that are possible, and what must come."""
        ...


class Asked(NamedTuple):
    """A row that is asked for: its step in the plan, its number of tokens, and the most drafts."""

    step: RowStep
    known: int
    most: int


class Found(NamedTuple):
    """A guess, and how likely its first token holds."""

    guess: Guess | None = None
    likelihood: float = 0.0


NOTHING: Final = Found()


class Asking:
    """The drafters, and what they guess. One that raises is not asked again.

    Parameters
    ----------
    drafters
        Asked in turn, until one has an idea that is likely; of all others the likeliest is taken.
        Those that compute for all rows come behind those that do not.
    tokens
        [R + 1, L] int32 on the host, the rows' token buffer: (row, position) -> token id.
    restrictions
        Asked for the drafts of rows that something restricts.
    widths
        Told of rows that nobody has an idea for.

    Attributes
    ----------
    resting
        Rows that nobody had an idea for, until somebody has one.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        tokens: np.ndarray,
        restrictions: Restrictions,
        widths: Widths,
    ) -> None:
        self._drafters = list(drafters)
        self._followers = [each for each in self._drafters if isinstance(each, Follower)]
        self._lagging = [each for each in self._drafters if isinstance(each, Lagging)]
        self._batch_drafters = [each for each in self._drafters if isinstance(each, BatchDrafter)]
        self._sort_drafters()
        self._tokens = tokens
        self._restrictions = restrictions
        self._widths = widths
        self.resting = RestingRows(widths)
        # Restricted rows that were asked for in this step, and their tokens that this has saved.
        self._restricted: frozenset[int] = frozenset()
        self._gained = 0
        # Steps that asking for restricted rows has saved each time, less what it took.
        self._saved = _SAVED_AT_FIRST
        # Restricted rows that wait to be asked for, or were.
        self._begun: set[int] = set()

    def _sort_drafters(self) -> None:
        """Note who is asked for which rows; those that compute are asked behind these."""
        self._quick = [each for each in self._drafters if not isinstance(each, BatchDrafter)]
        self._for_free = [each for each in self._quick if not isinstance(each, RestrictedLookup)]
        # Those of them that say quickly that they have no idea, if all do.
        screening = [each for each in self._for_free if isinstance(each, Screening)]
        self._screening = screening if len(screening) == len(self._for_free) else None

    @property
    def batch_drafters(self) -> Sequence[BatchDrafter]:
        """Those that compute for all rows of a step at once, have not failed, and do not rest."""
        # Every step asks for them several times, and mostly there are none.
        if not self._batch_drafters:
            return ()
        return [each for each in self._batch_drafters if not each.effort.rests]

    @property
    def works_in_every_step(self) -> bool:
        """Whether one of them has something to do also in steps in which nobody is asked."""
        return bool(self._batch_drafters or self._lagging)

    @property
    def has_followers(self) -> bool:
        """Whether one of them knows requests."""
        return bool(self._followers)

    @property
    def reads_texts(self) -> bool:
        """Whether one of them reads what requests have said when they end."""
        return any(each.reads_texts for each in self._followers)

    def install(self, row: int, request: DeviceRequest | None) -> None:
        """The row has been given to this request; ``None``: to one that could not be installed."""
        self.vacate(row)
        if request is not None:
            # Of those that compute nobody knows what they guess before they do.
            if not self._batch_drafters:
                self.resting.install(row)
            for follower in tuple(self._followers):
                self.attempt(follower, follower.install, row, request)

    def vacate(self, row: int) -> None:
        """Nobody is in the row any more: what is kept of it goes."""
        self.resting.vacate(row)
        self._begun.discard(row)
        for drafter in tuple(self._batch_drafters):
            self.attempt(drafter, drafter.vacate, row)

    def finish(self, plan: StepPlan) -> None:
        """Before a plan is applied: let drafters read the ends of rows that do not go on in it."""
        drafters = self.batch_drafters
        if not drafters:
            return
        going_on = {step.row for step in plan.rows}
        going_on.difference_update([install.row for install in plan.installs])
        for drafter in drafters:
            self.attempt(drafter, drafter.finish, lambda row: row not in going_on)

    def finish_row(self, row: int) -> None:
        """The same where the row's request has ended, while nothing else has happened."""
        for drafter in self.batch_drafters:
            self.attempt(drafter, drafter.finish, lambda other: other == row)

    def begin(self, plan: StepPlan) -> None:
        """A step begins: those that compute rest where that brings nothing."""
        if not self._batch_drafters:
            return
        for drafter in tuple(self._batch_drafters):
            effort = drafter.effort
            rested = effort.rests
            effort.begin(len(plan.rows))
            if effort.rests and not rested:
                logger.info("the drafter %s rests: few of its guesses are of use", drafter.source)
                self.attempt(drafter, drafter.rest)
            elif rested and not effort.rests:
                self._widths.forget(drafter.source)

    def verified(self, row: int, guess: Guess, accepted: int) -> None:
        """A row's guess was verified, and so many of its tokens were right."""
        if row in self._restricted:
            self._gained += accepted
            if self._saved < 0:
                self._widths.found_nothing(row, restricted=True, costs_more=True)
        for drafter in self._batch_drafters:
            if drafter.source == guess.source:
                drafter.effort.verified(accepted)

    def leave(self, row: int, request: DeviceRequest, tokens: np.ndarray) -> None:
        """The row's request has ended; ``tokens`` [n] int32 are its prompt and output, a view."""
        for follower in tuple(self._followers):
            self.attempt(follower, follower.leave, row, request, tokens)

    def forget(self) -> None:
        """Let nothing that this server has said so far be found any more."""
        for follower in tuple(self._followers):
            if isinstance(follower, SharedHistory):
                self.attempt(follower, follower.forget)

    def catch_up(self) -> None:
        """Do a small part of what drafters have put off."""
        if not self._lagging:
            return
        for drafter in tuple(self._lagging):
            self.attempt(drafter, drafter.catch_up)

    def most(self, step: RowStep, known: int) -> int:
        """The most drafts of a row in this step."""
        most = min(step.drafts, step.limit - known - 1)
        if not self._widths.asks(step.row):
            return 0
        if self._restrictions.never_drafts(step.row):
            # So that no step is planned for its drafts.
            self.nothing_pays(step.row)
            return 0
        if self._saved < 0 and self._begins_restricted(step.row, known + most):
            self._widths.found_nothing(step.row, restricted=True, costs_more=True)
            return 0
        return most

    def _begins_restricted(self, row: int, position: int) -> bool:
        """Whether a row is restricted up to this position for the first time."""
        if row in self._begun or self._restrictions.leaves_free(row, position):
            return False
        self._begun.add(row)
        return True

    def look(self, plan: StepPlan, since: float) -> bool:
        """Look whether there are guesses of rows that rest, and wake those that have some.

        Returns whether it has looked, which takes time. Rows whose pauses end together are looked
        at in several steps, if that would take longer than a millisecond.

        Parameters
        ----------
        since
            `time.monotonic` when the step began. All that has been done since is the price of
            looking: a step in which nobody is looked at does none of it.
        """
        due = self.resting.due(plan)
        if not due:
            return False
        # As many tokens as the next steps have without prompts, beside which there are no drafts.
        certain = sum([step.samples for step in plan.rows])
        begun, none_pays = time.monotonic(), self._widths.none_pays(certain)
        for index, step in enumerate(due):
            if index and time.monotonic() - begun > _LOOKING_SECONDS:
                self._widths.asks_again()
                break
            row = step.row
            if none_pays or self._restrictions.never_drafts(row):
                self._widths.nothing_pays(row)
            # Behind drafts in flight its number of tokens is not known yet.
            elif step.slack or not self._may_find(step, certain):
                self._widths.found_nothing(row)
            else:
                self.resting.wake(row)
        self._widths.asked(certain, time.monotonic() - since)
        return True

    def _may_find(self, step: RowStep, certain: int) -> bool:
        """Whether there may be a guess that pays of a row, in steps of so many ``certain`` tokens.

        What a grammar leaves is not found out on the side: it may be. Of what a model guesses it is
        known how often it has held.
        """
        # Behind that are the drafts of this step, which are not known yet.
        row, known = step.row, step.start + step.num_tokens - step.drafts
        if not self._restrictions.leaves_free(row, known):
            return True
        for drafter in self.batch_drafters:
            if self._widths.may_pay(Guess([0], SURE, drafter.source), certain):
                return True
        # Mostly nobody has an idea, and that alone is found out much faster.
        tokens = self._tokens[row, :known]
        if self._screening is not None:
            for screen in self._screening:
                if self.attempt(screen, screen.may_guess, row, tokens):
                    break
            else:
                return False
        guess = self._likeliest(self._for_free, Asked(step, known, 1)).guess
        return guess is not None and self._widths.may_pay(guess, certain)

    def found_nothing(self, row: int) -> None:
        """There is no guess of a row, or none that pays: it rests until there is one."""
        self._widths.found_nothing(row)
        self.resting.add(row)

    def held_back(self, row: int) -> None:
        """A row's guess would have paid, but for rows without: it rests until these have some."""
        self._widths.held_back(row)
        self.resting.add(row)

    def nothing_pays(self, row: int) -> None:
        """No guess of a row would pay: it rests until one may."""
        self._widths.nothing_pays(row)
        self.resting.add(row)

    def compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        """Let those drafters compute that do so for all rows of a step at once."""
        for drafter in self.batch_drafters:
            self.attempt(drafter, drafter.compute, rows, asked)

    def guesses(self, rows: Sequence[RowStep], asked: Mapping[int, Asked]) -> dict[int, Guess]:
        """Place among the rows -> what is guessed of the row's next tokens.

        Those that compute for all rows at once are asked last, for rows that have no likely guess.
        Drafters with weights know no grammar, so rows that have one are not asked of them, but of a
        look-up in their stead.
        """
        free = {
            place: self._restrictions.leaves_free(step.row, known + most)
            for place, (step, known, most) in asked.items()
        }
        found = {
            place: self._likeliest(self._for_free if free[place] else self._quick, each)
            for place, each in asked.items()
        }
        # Those that compute are asked only where a guess would be taken.
        open_ = [
            place
            for place, each in found.items()
            if free[place] and each.likelihood < _LIKELY_ENOUGH
        ]
        self.compute(rows, {asked[place].step.row: asked[place].most for place in open_})
        for place in open_:
            found[place] = self._likeliest(self.batch_drafters, asked[place], found[place])
        guesses: dict[int, Guess] = {}
        restricted: dict[int, tuple[Wanted, Guess | None]] = {}
        for place, (step, _, most) in asked.items():
            guess = found[place].guess
            if not free[place]:
                wanted = Wanted(step.row, () if guess is None else guess.token_ids, most)
                restricted[place] = wanted, guess
            elif guess is not None:
                guesses[place] = guess
            else:
                self.found_nothing(step.row)
        self._restricted = frozenset([wanted.row for wanted, _ in restricted.values()])
        self._gained = 0
        if restricted:
            guesses |= self._possible(restricted)
        return guesses

    def _possible(self, restricted: Mapping[int, tuple[Wanted, Guess | None]]) -> dict[int, Guess]:
        """What is possible of the guesses of restricted rows, and what they are forced to."""
        found = self._restrictions.draft([wanted for wanted, _ in restricted.values()])
        guesses = {}
        for (place, (wanted, guess)), token_ids in zip(restricted.items(), found, strict=True):
            if not token_ids:
                costs_more = self._saved < 0
                self._widths.found_nothing(wanted.row, restricted=True, costs_more=costs_more)
            elif guess is not None and guess.token_ids[0] == token_ids[0]:
                # What is forced behind it was not guessed, and is a draft of the next step.
                guesses[place] = guess._replace(token_ids=_common(guess.token_ids, token_ids))
            else:
                guesses[place] = Guess(token_ids, 0, FORCED)
        return guesses

    def took(self, plan: StepPlan, seconds: float) -> None:
        """An exact plan of rows that sample took so long: account for what asking has saved."""
        asked, self._restricted = self._restricted, frozenset()
        # Where other rows have drafts too, nobody knows whose they were that took the time.
        if asked and all(step.row in asked or not step.drafts for step in plan.rows):
            longer = self._widths.longer(plan.num_tokens - plan.num_drafts, seconds)
            saved = self._gained / len(plan.rows) - min(longer, _MOST_LONGER)
            self._saved += _FRESH * (saved - self._saved)

    def _likeliest(
        self, drafters: Sequence[Drafter], asked: Asked, found: Found = NOTHING
    ) -> Found:
        """The likeliest guess of these drafters and the one that was found, if there is any."""
        row, most = asked.step.row, asked.most
        tokens = self._tokens[row, : asked.known]
        for drafter in tuple(drafters):
            if drafter not in self._drafters:
                # It has failed for another row.
                continue
            guess = self.attempt(drafter, drafter.propose, row, tokens, most)
            if guess is None or not guess.token_ids:
                continue
            likelihood = self._widths.likelihood(guess)
            if likelihood > found.likelihood:
                found = Found(guess._replace(token_ids=guess.token_ids[:most]), likelihood)
            if likelihood >= _LIKELY_ENOUGH:
                break
        return found

    def attempt(
        self, drafter: Drafter, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """What a drafter's method returns; ``None`` if it fails, and then it is asked no more."""
        try:
            return call(*args, **kwargs)
        # Nobody needs a draft. So whatever is wrong with a drafter, no request ends by it.
        except Exception:
            self._drafters.remove(drafter)
            self._followers = [each for each in self._followers if each is not drafter]
            self._lagging = [each for each in self._lagging if each is not drafter]
            self._batch_drafters = [each for each in self._batch_drafters if each is not drafter]
            self._sort_drafters()
            name = type(drafter).__name__
            logger.exception("the drafter %s failed, and is not asked any more", name)
            return None


def _common(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The tokens with which both begin."""
    pairs = zip(first, second, strict=False)
    return [token_id for token_id, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
