"""Gives a step its drafts, and says which of them were right.

Only the device knows where a row ends while a step in flight drafts for it. On the host, the device
thread runs steps in order, so at the beginning of a step it knows every row's tokens. It asks the
drafters there, and turns the plan's bounds into an exact plan. Everything behind it computes rows
of several tokens as it computes prompts.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from src.core.draft_counts import DraftCounts
from src.core.plan import RowStep, StepPlan
from src.core.step_message import DeviceRequest
from src.engine.speculation.asking import Asked, Asking, Restrictions
from src.engine.speculation.drafter import Drafter
from src.engine.speculation.guess import Guess
from src.engine.speculation.hidden_states import HiddenStates
from src.engine.speculation.newcomers import Newcomers
from src.engine.speculation.states_behind import RowStates, StatesBehind
from src.engine.speculation.widths import Widths


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


class Speculation:
    """Drafts for rows, and their verification. Only the device thread uses it.

    Parameters
    ----------
    drafters, tokens, restrictions
        See `Asking`.
    poison
        What stands in the buffer where there is no token.
    widths
        Chooses how many guesses are verified.
    states
        Recurrent states of the rows, if the model has some.
    counts
        What becomes the attribute.

    Attributes
    ----------
    counts
        What was drafted and accepted so far. Any thread may read it.
    hidden
        Hands hidden states to the drafters that read them.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        tokens: np.ndarray,
        restrictions: Restrictions,
        poison: int,
        widths: Widths | None = None,
        states: RowStates | None = None,
        *,
        counts: DraftCounts | None = None,
    ) -> None:
        self.counts = counts or DraftCounts()
        self._widths = widths or Widths()
        self._asking = Asking(drafters, tokens, restrictions, self._widths)
        self._states = StatesBehind(states)
        # The last row of the buffer is padding.
        self._newcomers = Newcomers(len(tokens) - 1)
        self.hidden = HiddenStates(self._asking)
        self._tokens = tokens
        self._poison = poison
        # Row -> key of the request that was last installed in it.
        self._keys: dict[int, int] = {}
        # Rows of steps that have failed: what stands in them is no text.
        self._failed: set[int] = set()
        # Whether a drafter was asked in this step.
        self._has_asked = False
        # How many exact steps of so many rows need nothing of all this, and how many have begun
        # since the last step that did.
        self._idle = self._idle_rows = self._passed = 0
        # Row -> its number of tokens, of rows whose last step drafted or began behind drafts.
        self._lengths: dict[int, int] = {}

    def install(self, row: int, request: DeviceRequest | None) -> None:
        """The row has been given to this request; ``None``: to one that could not be installed."""
        self._lengths.pop(row, None)
        self._states.vacate(row)
        self._widths.vacate(row)
        self._failed.discard(row)
        self._keys.pop(row, None)
        if request is not None:
            # Nobody goes on in a row that it had before a preemption.
            for other in [each for each, key in self._keys.items() if key == request.key]:
                self._states.vacate(other)
                self._asking.vacate(other)
                del self._keys[other]
            self._keys[row] = request.key
        self._asking.install(row, request)

    def leave(self, row: int, request: DeviceRequest) -> None:
        """The row's request has ended."""
        # Nobody catches up with it, so it takes no room from those that do.
        self._states.vacate(row)
        self._widths.vacate(row)
        self._asking.finish_row(row)
        self._asking.vacate(row)
        if not self._asking.has_followers:
            return
        tokens = self._tokens[row]
        end = 0
        if self._asking.reads_texts and row not in self._failed:
            end = self._end(tokens, request.prompt_len)
        self._asking.leave(row, request, tokens[:end])

    def _end(self, tokens: np.ndarray, begin: int) -> int:
        """Where a row's text ends, which reaches to ``begin`` at least.

        Nothing stands behind it, so it need not be read: the buffer is as long as the context.
        """
        return bisect_left(tokens.data, True, begin, key=lambda token: token == self._poison)

    def lets_pass(self, plan: StepPlan) -> bool:
        """Whether a step needs nothing of all this. Then it is computed as without speculation.

        So are most steps of rows that rest: nobody is looked at in them, and they are not measured.
        """
        # Every step waits for this, and those of a small model take little longer than it.
        if self._idle < 1 or len(plan.rows) != self._idle_rows or plan.installs:
            return False
        for step in plan.rows:
            if step.drafts or step.slack:
                return False
        self._idle -= 1
        self._passed += 1
        return True

    def finish(self, plan: StepPlan) -> None:
        """Before a plan is applied: what it overwrites is read that has to be."""
        self._asking.finish(plan)

    def fail(self, plan: StepPlan) -> None:
        """The step of this plan has failed, and its rows are made harmless."""
        self._idle = 0
        for step in plan.rows:
            self._failed.add(step.row)
            self._asking.vacate(step.row)
        self._failed.update(install.row for install in plan.installs)

    def forget(self) -> None:
        """Let nothing that this server has said so far be found any more."""
        self._asking.forget()

    def catch_up(self) -> None:
        """Do a small part of what drafters have put off; call it behind a step."""
        self._asking.catch_up()

    def begin(self, plan: StepPlan) -> Verification | None:
        """Draft for the rows that may have drafts; the plan has been applied to its rows.

        ``None``: the plan is exact as it is.
        """
        since = time.monotonic()
        self._widths.begin(1 + self._passed)
        self._idle = self._passed = 0
        if plan.installs and self._newcomers.joined(plan):
            self._widths.joined()
        self._asking.begin(plan)
        self._has_asked = self._asking.look(plan, since)
        if not (_has_bounds(plan) or self._states.are_behind(plan)):
            self._asking.compute(plan.rows, {})
            return None
        certain = plan.num_tokens - plan.num_drafts
        begun, none_pays = time.monotonic(), self._widths.none_pays(certain)
        asks = not none_pays and self._widths.may_draft(certain, joins=bool(plan.installs))
        rows: list[RowStep] = []
        drafts: list[Guess | None] = []
        index: list[int] = []
        # Per place among the rows.
        asked: dict[int, Asked] = {}
        for step in plan.rows:
            if not (step.drafts or step.slack):
                index.append(len(rows))
                rows.append(self._states.from_states(step))
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
                self._asking.nothing_pays(step.row)
            elif asks and (most := self._asking.most(step, known)) > 0:
                asked[len(rows)] = Asked(step, known, most)
            index.append(len(rows))
            exact = RowStep(step.row, step.generation, known - 1, 1, True)
            rows.append(self._states.from_states(exact))
            drafts.append(None)
        self._has_asked = self._has_asked or bool(asked)
        guesses = self._asking.guesses(rows, asked)
        if guesses:
            steps = [rows[place] for place in guesses]
            sampling = [step.row for step in rows if step.samples]
            guessing = {step.row for step in steps}
            widths = self._widths.choose(
                list(guesses.values()),
                len(sampling),
                certain,
                self._states.again(steps),
                others=[row for row in sampling if row not in guessing],
            )
            widths = self._states.narrow(steps, widths)
            self._widths.charge(sampling, certain, sum(widths))
            for (place, guess), width in zip(guesses.items(), widths, strict=True):
                if width:
                    guess = guess._replace(token_ids=guess.token_ids[:width])
                    rows[place] = self._with_drafts(rows[place], guess.token_ids)
                    drafts[place] = guess
                    self._asking.resting.wake(rows[place].row)
                elif self._widths.has_held_back:
                    self._asking.held_back(rows[place].row)
                else:
                    self._asking.nothing_pays(rows[place].row)
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
        return RowStep(
            step.row, step.generation, step.start, num_tokens, True, count, again=step.again
        )

    def observe(self, plan: StepPlan, seconds: float, *, verified: bool = True) -> None:
        """Note how long an exact plan took, if all of its rows sample behind their last token.

        Of those that were not ``verified``, and so have no drafts, some are enough. A step in which
        drafters were asked in vain says nothing of what steps take without drafts.
        """
        if not (self._asking.works_in_every_step or self._states.any_behind or self.has_news):
            self._idle, self._idle_rows = self._widths.idle_steps, len(plan.rows)
        if not verified and self._widths.is_fresh(len(plan.rows)):
            return
        tokens = drafts = 0
        for step in plan.rows:
            if not step.samples or step.num_tokens != 1 + step.drafts:
                return
            tokens += step.num_tokens
            drafts += step.drafts
        if verified:
            self._asking.took(plan, seconds)
        # If all rows have ended, nothing was computed.
        if tokens and (drafts or not self._has_asked):
            self._widths.took(tokens, drafts, seconds)

    @property
    def computes(self) -> bool:
        """Whether a drafter computes before steps do."""
        return bool(self._asking.batch_drafters)

    def rests(self, row: int) -> int:
        """For how many steps from the next one on a row will have no drafts; -1: it is woken."""
        return self._asking.resting.rests(row)

    @property
    def has_news(self) -> bool:
        """Whether the next result has to say of rows that they rest, or are woken."""
        return self._asking.resting.has_news

    def settle(self, verification: Verification, token_ids: Sequence[int]) -> None:
        """Compare what a step has sampled, and has written to its rows, with its drafts.

        Parameters
        ----------
        token_ids
            Of all rows that sample, in order; negative where there was no choice.
        """
        kept: list[int] = []
        wrong: list[tuple[RowStep, int]] = []
        at = 0
        for step, guess in zip(verification.plan.rows, verification.drafts, strict=True):
            sampled = token_ids[at : at + step.num_sampled]
            at += len(sampled)
            drafts = () if guess is None else guess.token_ids
            count = _count_kept(sampled, drafts) if step.samples else 0
            kept.append(count)
            if guess is not None:
                self._widths.verified(step.row, guess, count - 1)
                self._asking.verified(step.row, guess, count - 1)
                if count == 1:
                    self._asking.resting.add(step.row)
                self.counts.add(len(drafts), count - 1, guess.source)
                if count < 1 + len(drafts):
                    wrong.append((step, count))
            if step.samples:
                end = step.start + step.num_tokens - len(drafts) + count
                self._lengths[step.row] = end
                if len(sampled) > count:
                    # Nobody may read what was rejected, and so would fail loudly.
                    self._tokens[step.row, end : end + len(sampled) - count] = self._poison
        self._states.restore(wrong)
        verification.kept = kept


def _has_bounds(plan: StepPlan) -> bool:
    """Whether a plan leaves open what is computed, or may have drafts. Most do not."""
    # A plain loop: every step waits for this.
    for step in plan.rows:  # noqa: SIM110
        if step.drafts or step.slack:
            return True
    return False


def _count_kept(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of a row's sampled tokens count: those behind right drafts only, and the first."""
    count = 1
    for draft, token, following in zip(drafts, sampled, sampled[1:], strict=False):
        # Where the model has no choice, the next step finds that out again, and says so.
        if draft != token or following < 0:
            break
        count += 1
    return count
