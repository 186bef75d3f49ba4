"""Who is asked for drafts, and how many, where the device drafts and the host hears of it later.

The device thread asks before it launches a step, and the thread that waits for results says what
came of it. Each holds one lock meanwhile, for some microseconds; nobody waits for the device in it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

import msgspec
from torch import Tensor

from src.compile.graphs.ladder import verify_widths
from src.core.draft_counts import DraftCounts
from src.core.plan import RowStep, StepPlan
from src.engine.speculation.guess import Guess
from src.engine.speculation.newcomers import Newcomers
from src.engine.speculation.resting_rows import RestingRows
from src.engine.speculation.widths import Widths
from src.ops import look_up

logger = logging.getLogger(__name__)

# For how many steps a row rests that never has drafts.
_FOR_GOOD: Final = 1 << 30
# So many launches of steps with drafts may fail one after the other; then there are none any more.
_MOST_FAILURES: Final = 3


class Bounds(NamedTuple):
    """What a device looks up.

    Attributes
    ----------
    least, longest
        The fewest tokens of a match, and the most that it needs.
    source
        What its guesses are counted as.
    most
        The most drafts of a row.
    """

    least: int
    longest: int
    source: str = "suffix"
    most: int = 16

    def proposing(self, most: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """What looks up to ``most`` drafts of each row up: of tokens, rows, lengths, wanted."""
        return partial(_look_up, bounds=self, most=most)


def _look_up(
    tokens: Tensor, rows: Tensor, lengths: Tensor, wanted: Tensor, *, bounds: Bounds, most: int
) -> Tensor:
    return look_up(tokens, rows, lengths, wanted, bounds.least, bounds.longest, most)


class RowLimits(Protocol):
    """What the host must know of a row before the device may draft for it."""

    def never_drafts(self, row: int) -> bool:
        """Whether the host must follow the row's tokens one by one, for as long as it has them."""
        ...

    def may_draft(self, row: int, least: int, most: int) -> bool:
        """Whether it needs no exact position of sampled tokens from ``least`` to ``most``."""
        ...


class Verdict(Protocol):
    """What came of a row: tokens that hold, drafts (-1: it had ended), length of their match."""

    @property
    def kept(self) -> int: ...

    @property
    def drafted(self) -> int: ...

    @property
    def match(self) -> int: ...


class _Ends(NamedTuple):
    """How many tokens a row has behind the steps that were launched, at least and at most."""

    least: int
    most: int


class DeviceSpeculation:
    """Lowers the drafts that a plan allows to those that are worth it, and learns what they are.

    Parameters
    ----------
    bounds
        Of look-ups.
    limits
        Of rows.
    widths
        Chooses how many drafts there are.
    max_sampled
        The most positions that a step with drafts samples: rows times the width of the widest.
    num_rows
        How many rows there are.

    Attributes
    ----------
    counts
        What was drafted and accepted so far. Any thread may read it.
    """

    def __init__(
        self,
        bounds: Bounds,
        limits: RowLimits,
        max_sampled: int,
        num_rows: int,
        widths: Widths | None = None,
    ) -> None:
        self.bounds = bounds
        self.counts = DraftCounts([bounds.source], bounds.most)
        self._limits = limits
        self._max_sampled = max_sampled
        # Numbers of drafts for which steps are captured.
        self._possible = [width - 1 for width in verify_widths(bounds.most)]
        self._widths = widths or Widths()
        self._resting = RestingRows(self._widths)
        self._newcomers = Newcomers(num_rows)
        self._lock = threading.Lock()
        # Row -> which of its owners has it: results of those before it say nothing of it.
        self._generations: dict[int, int] = {}
        # Rows that never have drafts: kept, because only the device's thread may ask for limits.
        self._never: set[int] = set()
        # Row -> where it ends. A plan's bounds are of the drafts that it allows, and these are of
        # those that were launched: a row without any is exact, and no step has noted its length.
        self._ends: dict[int, _Ends] = {}
        # Row -> the length of its last match: the best that is known before it is looked for.
        self._matches: dict[int, int] = {}
        # Launches that have failed since the last one that did not.
        self._failures = 0

    def install(self, row: int, generation: int) -> None:
        """The row has another request, which was installed. On the device's thread."""
        never = self._limits.never_drafts(row)
        with self._lock:
            (self._never.add if never else self._never.discard)(row)
            self._generations[row] = generation
            self._matches.pop(row, None)
            self._ends.pop(row, None)
            self._widths.vacate(row)
            self._resting.vacate(row)

    def begin(self, plan: StepPlan) -> StepPlan:
        """The plan that is launched: rows with bounds last, with the drafts that are worth it.

        Where each row before those begins is known, so what is made of all of its tokens' hidden
        states is found there. On the device's thread.
        """
        with self._lock:
            self._widths.begin()
            if plan.installs and self._newcomers.joined(plan):
                self._widths.joined()
            if not any(step.drafts or step.slack for step in plan.rows):
                for step in plan.rows:
                    self._ends.pop(step.row, None)
                return plan
            known = [self._known(step) for step in plan.rows]
            rows = [
                self._launched(*each) for each in zip(known, self._chosen(plan, known), strict=True)
            ]
        exact = [step for step in rows if not (step.drafts or step.slack)]
        bounded = [step for step in rows if step.drafts or step.slack]
        return msgspec.structs.replace(plan, rows=exact + bounded)

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Around the launch of a step with bounds. What makes all of them fail ends drafting."""
        try:
            yield
        except Exception as error:
            with self._lock:
                self._failures += 1
                ends = self._failures == _MOST_FAILURES
            if ends:
                logger.warning("nothing drafts any more: steps with drafts fail: %s", error)
            raise
        with self._lock:
            if not self._has_ended:
                self._failures = 0

    @property
    def _has_ended(self) -> bool:
        return self._failures >= _MOST_FAILURES

    def _known(self, step: RowStep) -> RowStep:
        """A row's step with the bounds that the launched steps leave."""
        if step.slack == 0:
            return step
        least = step.start + 1
        most = least + step.slack
        if (ends := self._ends.get(step.row)) is not None:
            least, most = max(least, ends.least), min(most, ends.most)
        return msgspec.structs.replace(step, start=least - 1, slack=most - least)

    def _launched(self, step: RowStep, width: int) -> RowStep:
        """A row's step with so many drafts; its end is noted."""
        if not (step.drafts or step.slack):
            limit = step.start + step.num_tokens + 1
        else:
            limit = step.limit
            step = msgspec.structs.replace(step, num_tokens=1 + width, drafts=width)
            if not (width or step.slack):
                # It begins where the plan says, and so it has not ended.
                step = RowStep(step.row, step.generation, step.start, 1, True)
        if step.samples:
            least = step.start + step.num_tokens - step.drafts
            most = least + step.slack
            self._ends[step.row] = _Ends(min(least + 1, limit), min(most + 1 + width, limit))
        return step

    def _chosen(self, plan: StepPlan, rows: Sequence[RowStep]) -> list[int]:
        """How many drafts each row of a plan has, of whose rows more is known."""
        widths = [0] * len(rows)
        if self._has_ended:
            return widths
        certain = plan.num_tokens - plan.num_drafts
        # There are none beside prompts, whose steps are long.
        if certain > len(rows) or not all(step.samples for step in rows):
            return widths
        asked = [at for at, step in enumerate(rows) if step.drafts and self._asks(step)]
        if not asked:
            return widths
        if self._widths.none_pays(certain):
            for at in asked:
                self._rest(rows[at].row, self._widths.nothing_pays)
            return widths
        if not self._widths.may_draft(certain, joins=bool(plan.installs)):
            return widths
        most = max(0, self._max_sampled // len(rows) - 1)
        guesses = [self._expected(rows[at].row, min(rows[at].drafts, most)) for at in asked]
        # All rows take the place of the widest, so those that are asked may have as many.
        possible = [drafts for drafts in self._possible if drafts <= most]
        width = self._widths.choose_width(guesses, len(rows), certain, possible)
        chosen = [min(width, len(guess.token_ids)) for guess in guesses]
        for at, width in zip(asked, chosen, strict=True):
            widths[at] = width
            if not width:
                self._rest(rows[at].row, self._widths.found_nothing)
        return widths

    def _asks(self, step: RowStep) -> bool:
        if not self._widths.asks(step.row) or step.row in self._never:
            return False
        least = step.start + step.num_tokens - step.drafts
        return self._limits.may_draft(step.row, least, least + step.slack + step.drafts)

    def _expected(self, row: int, most: int) -> Guess:
        """What a look-up is expected to find: as much as it found last."""
        match = self._matches.get(row, self.bounds.longest)
        return Guess([0] * most, match, self.bounds.source)

    def _rest(self, row: int, pause: Callable[[int], None]) -> None:
        pause(row)
        self._resting.add(row)

    def due(self, plan: StepPlan) -> list[RowStep]:
        """Steps of an exact plan whose rows are to be looked at on the side."""
        with self._lock:
            if self._has_ended:
                return []
            return [
                step
                for step in self._resting.due(plan)
                if not (step.slack or step.row in self._never)
            ]

    def looked(self, steps: Sequence[RowStep], matches: Sequence[int], num_rows: int) -> None:
        """The lengths of the matches that were found beside a step of so many rows, 0 for none."""
        with self._lock:
            for step, match in zip(steps, matches, strict=True):
                if self._generations.get(step.row) != step.generation:
                    continue
                if match and self._widths.may_pay(Guess([0], match, self.bounds.source), num_rows):
                    self._matches[step.row] = match
                    self._resting.wake(step.row)
                else:
                    self._widths.found_nothing(step.row)

    def settle(self, plan: StepPlan, verdicts: Sequence[Verdict]) -> None:
        """What came of a plan that was launched with bounds, per row."""
        with self._lock:
            for step, verdict in zip(plan.rows, verdicts, strict=False):
                if verdict.kept == 0:
                    continue
                accepted, source = verdict.kept - 1, self.bounds.source
                if verdict.drafted > 0:
                    self.counts.add(verdict.drafted, accepted, source)
                if self._generations.get(step.row) != step.generation or not step.drafts:
                    continue
                self._matches[step.row] = verdict.match
                if verdict.drafted > 0:
                    guess = Guess([0] * verdict.drafted, verdict.match, source)
                    self._widths.verified(step.row, guess, accepted)
                    if not accepted:
                        self._resting.add(step.row)
                else:
                    self._rest(step.row, self._widths.found_nothing)

    def took(self, num_rows: int, width: int, seconds: float) -> None:
        """A step of rows that sample up to ``width`` tokens, padding included, took so long."""
        with self._lock:
            self._widths.took(num_rows * width, num_rows * (width - 1), seconds)

    def rests(self, step: RowStep) -> int:
        """What the result of a row's step says, see ``RowResult.rests``."""
        with self._lock:
            if self._generations.get(step.row) != step.generation:
                return 0
            if self._has_ended or step.row in self._never:
                return _FOR_GOOD
            return self._resting.rests(step.row)
