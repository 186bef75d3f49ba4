"""Which steps began with requests that had waited for a step that could have drafts."""

from __future__ import annotations

from typing import Final

from src.core.plan import StepPlan

# In so many steps behind one in which nobody decodes, requests come in that began with it.
_BURST: Final = 2


class Newcomers:
    """Tells requests that found others decoding from those that began with them.

    Only the first are made to wait by drafts. Requests of a burst wait for prompts of the burst,
    which have no drafts beside them. Those that resume behind a preemption, or wait for a row,
    wait for much else, and sooner tokens of others help them.

    Parameters
    ----------
    num_rows
        How many there are.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        # The last step that installed something while nobody decoded.
        self._begun = -1 - _BURST

    def joined(self, plan: StepPlan) -> bool:
        """Whether a newcomer of this step has waited for the end of one that may have had drafts.

        Call it for every plan that installs something, in order.
        """
        installed = {install.row for install in plan.installs}
        if not any(
            step.samples and step.num_tokens == 1 + step.drafts and step.row not in installed
            for step in plan.rows
        ):
            self._begun = plan.step_id
            return False
        if plan.step_id <= self._begun + _BURST or len(plan.rows) >= self._num_rows:
            return False
        return any(len(each.token_ids) == each.prompt_len for each in plan.installs)
