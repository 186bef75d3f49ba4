"""Recurrent states of rows while drafts are verified: kept before a step, and given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from src.core.plan import RowStep, StepPlan

MOST_AGAIN: Final = 64
"""The most tokens that a step computes again beside those that were planned, of all rows together,
since drafts behind them were wrong."""

# The most tokens of a row that are certain, so that it has drafts behind them.
_LONGEST_CERTAIN: Final = 9


class RowStates(Protocol):
    """The recurrent states of rows, which a step overwrites."""

    num_backups: int

    def back_up(self, rows: Sequence[int]) -> None:
        """Keep the states of these rows, ``num_backups`` at most."""
        ...

    def restore(self, rows: Sequence[int]) -> None:
        """Give these rows the states that were kept."""
        ...


class StatesBehind:
    """Where the recurrent states of rows stand, if drafts of them were wrong.

    A state is overwritten by every token. So a step that verifies drafts keeps what states were
    before, and where a draft was wrong they are given back. They lack the accepted tokens then, and
    the row's next step begins at the first of these.

    Parameters
    ----------
    states
        ``None``: the model has none, and no row is ever behind.
    """

    def __init__(self, states: RowStates | None) -> None:
        self._states = states
        # Row -> tokens before its last one that its recurrent states do not have yet.
        self._behind: dict[int, int] = {}

    @property
    def any_behind(self) -> bool:
        """Whether a row is behind."""
        return bool(self._behind)

    def are_behind(self, plan: StepPlan) -> bool:
        """Whether a row of a plan begins earlier than the plan says."""
        return bool(self._behind) and any(step.row in self._behind for step in plan.rows)

    def vacate(self, row: int) -> None:
        """The row's request has ended, or the row has another one: nobody catches up with it."""
        self._behind.pop(row, None)

    def from_states(self, step: RowStep) -> RowStep:
        """The step of a row from where its recurrent states stand."""
        behind = self._behind.pop(step.row, 0)
        if not behind:
            return step
        num_tokens = step.num_tokens + behind
        start = step.start - behind
        return RowStep(step.row, step.generation, start, num_tokens, step.samples, again=behind)

    def again(self, steps: Sequence[RowStep]) -> list[int] | None:
        """Per row, how many tokens beside right drafts are computed again if a draft is wrong.

        ``None``: none is, since the model has no states.
        """
        return None if self._states is None else [step.num_tokens for step in steps]

    def narrow(self, steps: Sequence[RowStep], widths: Sequence[int]) -> list[int]:
        """Widths with which all states can be kept, and few tokens are computed again.

        Parameters
        ----------
        steps
            Of the rows that have guesses, without them.
        """
        if self._states is None:
            return list(widths)
        narrowed = [0] * len(widths)
        room, slots = MOST_AGAIN - sum(self._behind.values()), self._states.num_backups
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

    def back_up(self, rows: Sequence[int]) -> None:
        """Keep the states of these rows, which have drafts in this step."""
        if self._states is not None:
            self._states.back_up(rows)

    def restore(self, wrong: Sequence[tuple[RowStep, int]]) -> None:
        """Give back states that have wrong drafts.

        Parameters
        ----------
        wrong
            Steps with a wrong draft, and how many of their sampled tokens count.
        """
        if self._states is None or not wrong:
            return
        for step, kept in wrong:
            self._behind[step.row] = step.num_tokens - step.drafts + kept - 1
        self._states.restore([step.row for step, _ in wrong])
