"""What following one grammar may take of everybody's time."""

from __future__ import annotations

from src.engine.structured.compiled import ORDINARY_CALL, TimeBudget


def test_the_budget_is_of_what_is_beyond_the_ordinary() -> None:
    now = 0.0
    budget = TimeBudget(lambda: now)
    assert all(budget.allows(ORDINARY_CALL) for _ in range(10_000))
    assert budget.allows(0.2)
    assert not budget.allows(0.3)
    assert all(budget.allows(0.1) for _ in range(15))
    assert not budget.allows(0.1)
    # What is quick is never refused, and time heals.
    assert budget.allows(ORDINARY_CALL)
    assert budget.allows(32 * ORDINARY_CALL, 32)
    now = 100.0
    assert budget.allows(0.1)
