"""Gives a step its drafts, and says which of them were right.

Only the device knows where a row ends while a step in flight drafts for it. On the host, the device
thread runs steps in order, so at the beginning of a step it knows every row's tokens. It asks the
drafters there, and turns the plan's bounds into an exact plan. Everything behind it computes rows
of several tokens as it computes prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np

from src.core.draft_counts import DraftCounts
from src.core.plan import RowStep, StepPlan
from src.engine.grammar.look_ahead import Wanted
from src.engine.speculation.drafter import Drafter
from src.engine.speculation.widths import FORCED, Guess, Widths

logger = logging.getLogger(__name__)

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
        Per row of ``plan``, the tokens that were guessed.
    kept
        Per row of ``plan``, how many of its sampled tokens count; known once they are compared.
    index
        Per row of the scheduler's plan, its index in ``plan``; -1: left out.
    matches
        Per row of ``plan``, the length of the match that its drafts are from.
    """

    plan: StepPlan
    drafts: list[list[int]]
    index: list[int]
    matches: list[int]
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
        Asked in turn, until one has an idea. One that raises is not asked again.
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
        self._tokens = tokens
        self._restrictions = restrictions
        self._poison = poison
        # Row -> its number of tokens, of rows whose last step drafted or began behind drafts.
        self._lengths: dict[int, int] = {}

    def begin(self, plan: StepPlan) -> Verification | None:
        """Draft for the rows that may have drafts; the plan has been applied to its rows.

        ``None``: the plan is exact as it is.
        """
        self._widths.begin()
        for install in plan.installs:
            self._lengths.pop(install.row, None)
            self._behind.pop(install.row, None)
            self._widths.vacate(install.row)
        if not any(step.drafts or step.slack or step.row in self._behind for step in plan.rows):
            return None
        certain = plan.num_tokens - plan.num_drafts
        drafts_at_all = not self._widths.none_pays(certain)
        rows: list[RowStep] = []
        drafts: list[list[int]] = []
        index: list[int] = []
        guesses: dict[int, Guess] = {}
        restricted: dict[int, tuple[Wanted, Guess]] = {}
        for step in plan.rows:
            if not (step.drafts or step.slack):
                index.append(len(rows))
                rows.append(self._from_states(step))
                drafts.append([])
                continue
            known = step.start + 1
            if step.slack:
                # Unknown after a failure. The request has ended then, and any length will do.
                known = self._lengths.get(step.row, known)
            if known >= step.limit:
                index.append(-1)
                continue
            most = min(step.drafts, step.limit - known - 1)
            if not drafts_at_all:
                self._widths.nothing_pays(step.row)
            elif most > 0 and self._widths.asks(step.row):
                guess = self._propose(step.row, known, most)
                if not self._restrictions.leaves_free(step.row, known + most):
                    wanted = Wanted(step.row, guess.token_ids, most)
                    restricted[len(rows)] = wanted, guess
                elif guess.token_ids:
                    guesses[len(rows)] = guess
                else:
                    self._widths.found_nothing(step.row)
            index.append(len(rows))
            exact = RowStep(step.row, step.generation, known - 1, 1, True)
            rows.append(self._from_states(exact))
            drafts.append([])
        if restricted:
            guesses |= self._possible(restricted)
        matches = [0] * len(rows)
        if guesses:
            sampling = sum(step.samples for step in rows)
            widths = self._widths.choose(list(guesses.values()), sampling, certain)
            if self._states is not None:
                widths = self._narrow([rows[place] for place in guesses], widths)
            for (place, guess), width in zip(guesses.items(), widths, strict=True):
                if width:
                    rows[place] = self._with_drafts(rows[place], guess.token_ids[:width])
                    drafts[place], matches[place] = guess.token_ids[:width], guess.match
                else:
                    self._widths.found_nothing(rows[place].row)
        if self._states is not None:
            self._states.back_up([step.row for step in rows if step.drafts])
        return Verification(msgspec.structs.replace(plan, rows=rows), drafts, index, matches)

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

    def _with_drafts(self, step: RowStep, token_ids: list[int]) -> RowStep:
        """The step of a row, with drafts behind its last token, where they are written too."""
        known, count = step.start + step.num_tokens, len(token_ids)
        self._tokens[step.row, known : known + count] = token_ids
        num_tokens = step.num_tokens + count
        return RowStep(step.row, step.generation, step.start, num_tokens, True, count)

    def _possible(self, restricted: Mapping[int, tuple[Wanted, Guess]]) -> dict[int, Guess]:
        """What is possible of the guesses of restricted rows, and what they are forced to."""
        found = self._restrictions.draft([wanted for wanted, _ in restricted.values()])
        guesses = {}
        for (place, (wanted, guess)), token_ids in zip(restricted.items(), found, strict=True):
            if token_ids:
                is_guessed = list(guess.token_ids[:1]) == token_ids[:1]
                guesses[place] = Guess(token_ids, guess.match if is_guessed else FORCED)
            else:
                self._widths.found_nothing(wanted.row, restricted=True)
        return guesses

    def _propose(self, row: int, known: int, most: int) -> Guess:
        """What the first drafter guesses that has an idea; perhaps nothing."""
        tokens = self._tokens[row, :known]
        for drafter in tuple(self._drafters):
            try:
                guess = drafter.propose(row, tokens, most)
            # Nobody needs a draft. So whatever is wrong with a drafter, no request ends by it.
            except Exception:
                self._drafters.remove(drafter)
                name = type(drafter).__name__
                logger.exception("the drafter %s failed, and is not asked any more", name)
                continue
            if guess is not None and guess.token_ids:
                return Guess(guess.token_ids[:most], guess.match)
        return Guess([], 0)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Note how long an exact plan took, if all of its rows sample behind their last token."""
        # If all rows have ended, nothing was computed.
        if plan.rows and all(
            step.samples and step.num_tokens == 1 + step.drafts for step in plan.rows
        ):
            self._widths.took(plan.num_tokens, seconds)

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
        for step, drafts, match in zip(
            verification.plan.rows, verification.drafts, verification.matches, strict=True
        ):
            sampled = token_ids[at : at + step.num_sampled]
            at += len(sampled)
            count = _count_kept(sampled, drafts) if step.samples else 0
            kept.append(count)
            if drafts:
                self._widths.verified(step.row, match, len(drafts), count - 1)
                self.counts.add(len(drafts), count - 1)
            if self._states is not None and count < 1 + len(drafts) and drafts:
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


def _count_kept(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of a row's sampled tokens count: those behind right drafts only, and the first."""
    count = 1
    for draft, token, following in zip(drafts, sampled, sampled[1:], strict=False):
        # Where the model has no choice, the next step finds that out again, and says so.
        if draft != token or following < 0:
            break
        count += 1
    return count
