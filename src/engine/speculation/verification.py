"""Gives a step its drafts, and says which of them were right.

Only the device knows where a row ends while a step in flight drafts for it. On the host, the device
thread runs steps in order, so at the beginning of a step it knows every row's tokens. It asks the
drafters there, and turns the plan's bounds into an exact plan. Everything behind it computes rows
of several tokens as it computes prompts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from torch import Tensor

from src.core.draft_counts import DraftCounts
from src.core.plan import RowStep, StepPlan
from src.engine.speculation.drafter import BatchDrafter, Drafter, KeptHidden
from src.engine.speculation.widths import Guess, Widths

logger = logging.getLogger(__name__)


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


class Speculation:
    """Drafts for rows, and their verification. Only the device thread uses it.

    Parameters
    ----------
    drafters
        Asked in turn, until one has an idea. One that raises is not asked again.
    tokens
        [R + 1, L] int32 on the host, the rows' token buffer: (row, position) -> token id.
    drafts_for
        Whether a row may have drafts now.
    poison
        What stands in the buffer where there is no token.
    widths
        Chooses how many guesses are verified.

    Attributes
    ----------
    counts
        What was drafted and accepted so far. Any thread may read it.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        tokens: np.ndarray,
        drafts_for: Callable[[int], bool],
        poison: int,
        widths: Widths | None = None,
    ) -> None:
        self.counts = DraftCounts()
        self._widths = widths or Widths()
        self._drafters = list(drafters)
        self._tokens = tokens
        self._drafts_for = drafts_for
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
            self._widths.vacate(install.row)
            for drafter in self._batch_drafters:
                drafter.vacate(install.row)
        if not any(step.drafts or step.slack for step in plan.rows):
            self._compute(plan.rows, {})
            return None
        certain = plan.num_tokens - plan.num_drafts
        drafts_at_all = not self._widths.none_pays(certain)
        rows: list[RowStep] = []
        drafts: list[list[int]] = []
        index: list[int] = []
        # Per place among the rows: the row's step in the plan, its number of tokens, most drafts.
        asked: dict[int, tuple[RowStep, int, int]] = {}
        for step in plan.rows:
            if not (step.drafts or step.slack):
                index.append(len(rows))
                rows.append(step)
                drafts.append([])
                continue
            known = step.start + 1
            if step.slack:
                # Unknown after a failure. The request has ended then, and any length will do.
                known = self._lengths.get(step.row, known)
            if known >= step.limit:
                index.append(-1)
                continue
            if not drafts_at_all:
                self._widths.nothing_pays(step.row)
            elif most := self._most(step, known):
                asked[len(rows)] = (step, known, most)
            index.append(len(rows))
            rows.append(RowStep(step.row, step.generation, known - 1, 1, True))
            drafts.append([])
        matches = [0] * len(rows)
        self._compute(rows, {step.row: most for step, _, most in asked.values()})
        guesses = {
            place: guess
            for place, each in asked.items()
            if (guess := self._propose(*each)) is not None
        }
        if guesses:
            sampling = sum(step.samples for step in rows)
            widths = self._widths.choose(list(guesses.values()), sampling, certain)
            for (place, guess), width in zip(guesses.items(), widths, strict=True):
                if width:
                    rows[place] = self._with_drafts(rows[place], guess.token_ids[:width])
                    drafts[place], matches[place] = guess.token_ids[:width], guess.match
                else:
                    self._widths.found_nothing(rows[place].row)
        return Verification(msgspec.structs.replace(plan, rows=rows), drafts, index, matches)

    def _with_drafts(self, step: RowStep, token_ids: list[int]) -> RowStep:
        """The step of a row, with drafts behind its last token, where they are written too."""
        known, count = step.start + 1, len(token_ids)
        self._tokens[step.row, known : known + count] = token_ids
        return RowStep(step.row, step.generation, step.start, 1 + count, True, count)

    def _most(self, step: RowStep, known: int) -> int:
        """How many drafts a row of so many tokens is asked for; 0: it is not asked."""
        most = min(step.drafts, step.limit - known - 1)
        if most < 1 or not self._widths.asks(step.row):
            return 0
        if not self._drafts_for(step.row):
            # So that no step is planned for its drafts for a while.
            self._widths.nothing_pays(step.row)
            return 0
        return most

    def _propose(self, step: RowStep, known: int, most: int) -> Guess | None:
        tokens = self._tokens[step.row, :known]
        for drafter in tuple(self._drafters):
            guess = None
            with self._guarded(drafter):
                guess = drafter.propose(step.row, tokens, most)
            if guess is not None and guess.token_ids:
                return Guess(guess.token_ids[:most], guess.match)
        self._widths.found_nothing(step.row)
        return None

    def _compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        """Let those drafters compute that do so for all rows of a step at once."""
        for drafter in self._batch_drafters:
            with self._guarded(drafter):
                drafter.compute(rows, asked)

    @contextlib.contextmanager
    def _guarded(self, drafter: Drafter) -> Iterator[None]:
        """Ask a drafter that raises here no more. Nobody needs drafts: no request ends by it."""
        try:
            yield
        except Exception:
            self._drafters.remove(drafter)
            name = type(drafter).__name__
            logger.exception("the drafter %s failed, and is not asked any more", name)

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
            with self._guarded(drafter):
                if drafter.wants_hidden == "sampled":
                    drafter.keep(last, hidden)
                elif drafter.wants_hidden == "all":
                    drafter.keep_all(computed, hidden)

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
            if step.samples:
                end = step.start + step.num_tokens - len(drafts) + count
                self._lengths[step.row] = end
                # Nobody may read what was rejected, and so would fail loudly.
                self._tokens[step.row, end : end + len(sampled) - count] = self._poison
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
