"""What the host must know of rows before their device may draft for them."""

from __future__ import annotations

from src.engine.grammar.row_grammars import RowGrammars
from src.engine.sampling.state import SamplingState


class RowLimits:
    """Grammars, budgets of thinking, and parameters that go by positions on the host."""

    def __init__(self, grammars: RowGrammars, state: SamplingState) -> None:
        self._grammars = grammars
        self._state = state

    def never_drafts(self, row: int) -> bool:
        """Whether the host must follow the row's tokens one by one, for as long as it has them."""
        (params,) = self._state.params((row,))
        return bool(params.processors) or self._grammars.follows(row)

    def may_draft(self, row: int, least: int, most: int) -> bool:
        """Whether it needs no exact position of sampled tokens from ``least`` to ``most``."""
        (params,) = self._state.params((row,))
        return not params.goes_by_positions(least) and self._grammars.leaves_free(row, most)
