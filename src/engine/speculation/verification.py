"""Gives a step its drafts, and says which of them were right.

Only the device knows where a row ends while a step in flight drafts for it. On the host, the device
thread runs steps in order, so at the beginning of a step it knows every row's tokens. It asks the
drafters there, and turns the plan's bounds into an exact plan. Everything behind it computes rows
of several tokens as it computes prompts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, ParamSpec, Protocol, TypeVar

import msgspec
import numpy as np
from torch import Tensor

from src.core.draft_counts import DraftCounts
from src.core.plan import RowStep, StepPlan
from src.core.step_message import DeviceRequest
from src.engine.grammar.look_ahead import Wanted
from src.engine.speculation.drafter import BatchDrafter, Drafter, Follower, KeptHidden
from src.engine.speculation.guess import FORCED, Guess
from src.engine.speculation.widths import Widths

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# A guess that is likelier is taken without asking others.
_LIKELY_ENOUGH: Final = 0.7
# The most tokens that are computed again, since drafts behind them were wrong, for all rows of a
# step together; and the most of a row that are certain, so that it has drafts behind them.
_MOST_AGAIN: Final = 64
_LONGEST_CERTAIN: Final = 9


@dataclass
class Verification:
    """One step that verifies drafts, or whose rows have a start that the plan does not know.

    Attributes
    ----------
    plan
        What is computed: exact starts, and per row as many drafts as there are. Rows that have
        nothing left to compute are left out.
    drafts
        Per row of ``plan``, the tokens that are verified; ``None``: it has none.
    kept
        Per row of ``plan``, how many of its sampled tokens count; known once they are compared.
    index
        Per row of the scheduler's plan, its index in ``plan``; -1: left out.
    """

    plan: StepPlan
    drafts: list[Guess | None]
    index: list[int]
    kept: Sequence[int] = ()

    def taken(self, token_ids: Sequence[int]) -> list[Sequence[int]]:
        """Per row of ``plan`` that samples, those of the sampled tokens that count."""
        taken, at = [], 0
        for step, kept in zip(self.plan.rows, self.kept, strict=True):
            if step.samples:
                taken.append(token_ids[at : at + kept])
                at += step.num_sampled
        return taken


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


class RowStates(Protocol):
    """The recurrent states of rows, which a step overwrites."""

    num_backups: int

    def back_up(self, rows: Sequence[int]) -> None:
        """Keep the states of these rows, ``num_backups`` at most."""
        ...

    def restore(self, rows: Sequence[int]) -> None:
        """Give these rows the states that were kept."""
        ...


class Speculation:
    """Drafts for rows, and their verification. Only the device thread uses it.

    Parameters
    ----------
    drafters
        Asked in turn, until one has an idea that is likely; of all others the likeliest is taken.
        One that raises is not asked again.
    tokens
        [R + 1, L] int32 on the host, the rows' token buffer: (row, position) -> token id.
    restrictions
        Asked for the drafts of rows that something restricts.
    poison
        What stands in the buffer where there is no token.
    widths
        Chooses how many guesses are verified.
    states
        Recurrent states of the rows, if the model has some.

    Attributes
    ----------
    counts
        What was drafted and accepted so far. Any thread may read it.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        tokens: np.ndarray,
        restrictions: Restrictions,
        poison: int,
        widths: Widths | None = None,
        states: RowStates | None = None,
    ) -> None:
        self.counts = DraftCounts()
        self._states = states
        # Row -> tokens before its last one that its recurrent states do not have yet.
        self._behind: dict[int, int] = {}
        self._widths = widths or Widths()
        self._drafters = list(drafters)
        self._followers = [each for each in self._drafters if isinstance(each, Follower)]
        self._tokens = tokens
        self._restrictions = restrictions
        self._poison = poison
        # Row -> its number of tokens, of rows whose last step drafted or began behind drafts.
        self._lengths: dict[int, int] = {}

    def install(self, row: int, request: DeviceRequest | None) -> None:
        """The row has been given to this request; ``None``: to one that could not be installed."""
        self._lengths.pop(row, None)
        self._behind.pop(row, None)
        self._widths.vacate(row)
        for drafter in self._batch_drafters:
            self._attempt(drafter, drafter.vacate, row)
        if request is not None:
            for follower in tuple(self._followers):
                self._attempt(follower, follower.install, row, request)

    def leave(self, row: int, request: DeviceRequest) -> None:
        """The row's request has ended."""
        # Nobody catches up with it, so it takes no room from those that do.
        self._behind.pop(row, None)
        if not self._followers:
            return
        tokens = self._tokens[row]
        ends = np.flatnonzero(tokens == self._poison)
        known = tokens[: int(ends[0]) if len(ends) else len(tokens)]
        for follower in tuple(self._followers):
            self._attempt(follower, follower.leave, row, request, known)

    def begin(self, plan: StepPlan) -> Verification | None:
        """Draft for the rows that may have drafts; the plan has been applied to its rows.

        ``None``: the plan is exact as it is.
        """
        self._widths.begin()
        if not any(step.drafts or step.slack or step.row in self._behind for step in plan.rows):
            self._compute(plan.rows, {})
            return None
        certain = plan.num_tokens - plan.num_drafts
        begun, none_pays = time.monotonic(), self._widths.none_pays(certain)
        asks = not none_pays and self._widths.is_measured(certain)
        rows: list[RowStep] = []
        drafts: list[Guess | None] = []
        index: list[int] = []
        # Per place among the rows: the row's step in the plan, its number of tokens, most drafts.
        asked: dict[int, tuple[RowStep, int, int]] = {}
        for step in plan.rows:
            if not (step.drafts or step.slack):
                index.append(len(rows))
                rows.append(self._from_states(step))
                drafts.append(None)
                continue
            known = step.start + 1
            if step.slack:
                # Unknown after a failure. The request has ended then, and any length will do.
                known = self._lengths.get(step.row, known)
            if known >= step.limit:
                index.append(-1)
                continue
            if none_pays:
                self._widths.nothing_pays(step.row)
            elif asks and (most := self._most(step, known)) > 0:
                asked[len(rows)] = (step, known, most)
            index.append(len(rows))
            exact = RowStep(step.row, step.generation, known - 1, 1, True)
            rows.append(self._from_states(exact))
            drafts.append(None)
        guesses = self._guesses(rows, asked)
        if guesses:
            sampling = sum(step.samples for step in rows)
            widths = self._widths.choose(list(guesses.values()), sampling, certain)
            if self._states is not None:
                widths = self._narrow([rows[place] for place in guesses], widths)
            for (place, guess), width in zip(guesses.items(), widths, strict=True):
                if width:
                    guess = guess._replace(token_ids=guess.token_ids[:width])
                    rows[place] = self._with_drafts(rows[place], guess.token_ids)
                    drafts[place] = guess
                else:
                    self._widths.found_nothing(rows[place].row)
        if self._states is not None:
            self._states.back_up([step.row for step in rows if step.drafts])
        verification = Verification(msgspec.structs.replace(plan, rows=rows), drafts, index)
        if asks:
            self._widths.asked(certain, time.monotonic() - begun)
        return verification

    def _with_drafts(self, step: RowStep, token_ids: list[int]) -> RowStep:
        """The step of a row, with drafts behind its last token, where they are written too."""
        known, count = step.start + step.num_tokens, len(token_ids)
        self._tokens[step.row, known : known + count] = token_ids
        num_tokens = step.num_tokens + count
        return RowStep(step.row, step.generation, step.start, num_tokens, True, count)

    def _guesses(
        self, rows: Sequence[RowStep], asked: Mapping[int, tuple[RowStep, int, int]]
    ) -> dict[int, Guess]:
        """Place among the rows -> what is guessed of the row's next tokens.

        Drafters with weights know no grammar, so rows that have one are not asked of them.
        """
        free = {
            place: self._restrictions.leaves_free(step.row, known + most)
            for place, (step, known, most) in asked.items()
        }
        self._compute(
            rows, {step.row: most for place, (step, _, most) in asked.items() if free[place]}
        )
        guesses: dict[int, Guess] = {}
        restricted: dict[int, tuple[Wanted, Guess | None]] = {}
        for place, (step, known, most) in asked.items():
            guess = self._propose(step.row, known, most)
            if not free[place]:
                wanted = Wanted(step.row, () if guess is None else guess.token_ids, most)
                restricted[place] = wanted, guess
            elif guess is not None:
                guesses[place] = guess
            else:
                self._widths.found_nothing(step.row)
        if restricted:
            guesses |= self._possible(restricted)
        return guesses

    def _from_states(self, step: RowStep) -> RowStep:
        """The step of a row from where its recurrent states stand."""
        behind = self._behind.pop(step.row, 0)
        if not behind:
            return step
        num_tokens = step.num_tokens + behind
        return RowStep(step.row, step.generation, step.start - behind, num_tokens, step.samples)

    def _narrow(self, steps: Sequence[RowStep], widths: Sequence[int]) -> list[int]:
        """Widths with which all states can be kept, and few tokens are computed again.

        Parameters
        ----------
        steps
            Of the rows that have guesses, without them.
        """
        assert self._states is not None
        narrowed = [0] * len(widths)
        room, slots = _MOST_AGAIN - sum(self._behind.values()), self._states.num_backups
        # The widest first: they were expected to bring the most.
        for index in sorted(range(len(widths)), key=lambda index: (-widths[index], index)):
            certain = steps[index].num_tokens
            # One that has much to catch up with does that first.
            if not slots or certain > _LONGEST_CERTAIN:
                continue
            width = min(widths[index], room - certain)
            if width > 0:
                narrowed[index] = width
                room -= certain + width
                slots -= 1
        return narrowed

    def _possible(self, restricted: Mapping[int, tuple[Wanted, Guess | None]]) -> dict[int, Guess]:
        """What is possible of the guesses of restricted rows, and what they are forced to."""
        found = self._restrictions.draft([wanted for wanted, _ in restricted.values()])
        guesses = {}
        for (place, (wanted, guess)), token_ids in zip(restricted.items(), found, strict=True):
            if not token_ids:
                self._widths.found_nothing(wanted.row, restricted=True)
            elif guess is not None and guess.token_ids[0] == token_ids[0]:
                # What is forced behind it was not guessed, and is a draft of the next step.
                guesses[place] = guess._replace(token_ids=_common(guess.token_ids, token_ids))
            else:
                guesses[place] = Guess(token_ids, 0, FORCED)
        return guesses

    def _most(self, step: RowStep, known: int) -> int:
        """The most drafts of a row in this step."""
        most = min(step.drafts, step.limit - known - 1)
        if not self._widths.asks(step.row):
            return 0
        if self._restrictions.never_drafts(step.row):
            # So that no step is planned for its drafts for a while.
            self._widths.nothing_pays(step.row)
            return 0
        return most

    def _propose(self, row: int, known: int, most: int) -> Guess | None:
        """The likeliest guess of the drafters, if one has an idea."""
        tokens = self._tokens[row, :known]
        best, highest = None, 0.0
        for drafter in tuple(self._drafters):
            guess = self._attempt(drafter, drafter.propose, row, tokens, most)
            if guess is None or not guess.token_ids:
                continue
            likelihood = self._widths.likelihood(guess)
            if likelihood > highest:
                best, highest = guess._replace(token_ids=guess.token_ids[:most]), likelihood
            if likelihood >= _LIKELY_ENOUGH:
                break
        return best

    def _attempt(
        self, drafter: Drafter, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """What a drafter's method returns; ``None`` if it fails, and then it is asked no more."""
        try:
            return call(*args, **kwargs)
        # Nobody needs a draft. So whatever is wrong with a drafter, no request ends by it.
        except Exception:
            self._drafters.remove(drafter)
            self._followers = [each for each in self._followers if each is not drafter]
            name = type(drafter).__name__
            logger.exception("the drafter %s failed, and is not asked any more", name)
            return None

    def _compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        """Let those drafters compute that do so for all rows of a step at once."""
        for drafter in self._batch_drafters:
            self._attempt(drafter, drafter.compute, rows, asked)

    @property
    def _batch_drafters(self) -> list[BatchDrafter]:
        return [each for each in self._drafters if isinstance(each, BatchDrafter)]

    @property
    def wants_hidden(self) -> KeptHidden:
        """Which hidden states of a step its drafters read."""
        wanted = [drafter.wants_hidden for drafter in self._batch_drafters]
        return next((each for each in wanted if each != "none"), "none")

    def keep(
        self, plan: StepPlan, hidden: Tensor, verification: Verification | None = None
    ) -> None:
        """Keep a step's hidden states for the drafters that read them.

        Parameters
        ----------
        plan
            An exact plan, which was computed.
        hidden
            Those that `wants_hidden` has asked for.
        verification
            That of the plan, which is settled; ``None``: it has none.
        """
        kept = [1] * len(plan.rows) if verification is None else verification.kept
        last: dict[int, tuple[int, int]] = {}
        computed: dict[int, tuple[int, int, int]] = {}
        at = begin = 0
        for step, count in zip(plan.rows, kept, strict=True):
            if step.samples:
                # Behind it stands the row's newest token.
                known = step.start + step.num_tokens - step.drafts + count
                last[step.row] = (at + count - 1, known)
            at += step.num_sampled
            counts = step.num_tokens - step.drafts + (count - 1 if step.samples else 0)
            computed[step.row] = (begin, step.start, counts)
            begin += step.num_tokens
        for drafter in self._batch_drafters:
            if drafter.wants_hidden == "sampled":
                self._attempt(drafter, drafter.keep, last, hidden)
            elif drafter.wants_hidden == "all":
                self._attempt(drafter, drafter.keep_all, computed, hidden)

    def observe(self, plan: StepPlan, seconds: float, *, verified: bool = True) -> None:
        """Note how long an exact plan took, if all of its rows sample behind their last token.

        Of those that were not ``verified``, and so have no drafts, some are enough.
        """
        tokens = drafts = 0
        if not verified and self._widths.is_fresh(len(plan.rows)):
            return
        for step in plan.rows:
            if not step.samples or step.num_tokens != 1 + step.drafts:
                return
            tokens += step.num_tokens
            drafts += step.drafts
        # If all rows have ended, nothing was computed.
        if tokens:
            self._widths.took(tokens, drafts, seconds)

    def rests(self, row: int) -> int:
        """For how many steps from the next one on a row will have no drafts."""
        return max(0, self._widths.rests(row) - 1)

    def settle(self, verification: Verification, token_ids: Sequence[int]) -> None:
        """Compare what a step has sampled, and has written to its rows, with its drafts.

        Parameters
        ----------
        token_ids
            Of all rows that sample, in order; negative where there was no choice.
        """
        kept: list[int] = []
        wrong: list[int] = []
        at = 0
        for step, guess in zip(verification.plan.rows, verification.drafts, strict=True):
            sampled = token_ids[at : at + step.num_sampled]
            at += len(sampled)
            drafts = () if guess is None else guess.token_ids
            count = _count_kept(sampled, drafts) if step.samples else 0
            kept.append(count)
            if guess is not None:
                self._widths.verified(step.row, guess, count - 1)
                self.counts.add(len(drafts), count - 1, guess.source)
                if self._states is not None and count < 1 + len(drafts):
                    wrong.append(step.row)
                    self._behind[step.row] = step.num_tokens - len(drafts) + count - 1
            if step.samples:
                end = step.start + step.num_tokens - len(drafts) + count
                self._lengths[step.row] = end
                # Nobody may read what was rejected, and so would fail loudly.
                self._tokens[step.row, end : end + len(sampled) - count] = self._poison
        if self._states is not None and wrong:
            self._states.restore(wrong)
        verification.kept = kept


def _common(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The tokens with which both begin."""
    pairs = zip(first, second, strict=False)
    return [token_id for token_id, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _count_kept(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of a row's sampled tokens count: those behind right drafts only, and the first."""
    count = 1
    for draft, token, following in zip(drafts, sampled, sampled[1:], strict=False):
        # Where the model has no choice, the next step finds that out again, and says so.
        if draft != token or following < 0:
            break
        count += 1
    return count
