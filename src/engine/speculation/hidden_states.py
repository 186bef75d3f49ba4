"""Hands a step's hidden states to the drafters that read them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from src.core.plan import StepPlan
from src.engine.speculation.asking import Asking
from src.engine.speculation.drafter import KeptHidden


class HiddenStates:
    """Which hidden states of a step its drafters read, and where those of each row stand."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    @property
    def wanted(self) -> KeptHidden:
        """Which hidden states of a step its drafters read."""
        for drafter in self._asking.batch_drafters:
            if drafter.wants_hidden != "none":
                return drafter.wants_hidden
        return "none"

    def keep(self, plan: StepPlan, hidden: Tensor, kept: Sequence[int] | None = None) -> None:
        """Keep a step's hidden states for the drafters that read them.

        Parameters
        ----------
        plan
            An exact plan, which was computed.
        hidden
            Those that `wanted` has asked for.
        kept
            Per row of ``plan``, how many of its sampled tokens count; ``None``: each has one.
        """
        kept = [1] * len(plan.rows) if kept is None else kept
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
        for drafter in self._asking.batch_drafters:
            if drafter.wants_hidden == "sampled":
                self._asking.attempt(drafter, drafter.keep, last, hidden)
            elif drafter.wants_hidden == "all":
                self._asking.attempt(drafter, drafter.keep_all, computed, hidden)
