"""What following one grammar may take of everybody's time."""

from __future__ import annotations

from src.engine.structured.compiled import ORDINARY_CALL, REFUELED_TOKENS, TextJudge, TimeBudget


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


def test_what_a_judge_computes_on_the_way_is_charged() -> None:
    class Matcher:
        masks = 0

        def try_consume_tokens(self, token_ids: list[int]) -> int:
            return len(token_ids)

        def compute_bitmask(self) -> bytes:
            self.masks += 1
            return b""

    class Budget(TimeBudget):
        calls = 0

        def allows(self, seconds: float, num_calls: int = 1) -> bool:
            self.calls += num_calls
            # As if the mask were what is too much.
            return self.calls <= REFUELED_TOKENS

    matcher, budget = Matcher(), Budget()
    judge = TextJudge(matcher, lambda text: [1] * len(text), budget)  # type: ignore[arg-type]
    for _ in range(REFUELED_TOKENS):
        assert matcher.masks == 0
        judge.advance("a")
    assert matcher.masks == 1
    assert judge.completes("")
    # Nothing more is asked of it.
    judge.advance("a" * REFUELED_TOKENS)
    assert (matcher.masks, budget.calls) == (1, REFUELED_TOKENS + 1)
