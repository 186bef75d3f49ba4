from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.plan import RowStep, StepPlan
from src.engine.scheduling import pace
from src.engine.scheduling.pace import Pace

seconds = st.floats(0.0, 10.0)
counts = st.lists(st.integers(1, 300), min_size=1, max_size=4)


def plan_of(*num_tokens: int) -> StepPlan:
    rows = [RowStep(row, 0, 7, count, True) for row, count in enumerate(num_tokens)]
    return StepPlan(0, [], [], rows)


def verifying(*drafts: int) -> StepPlan:
    """Rows that decode, with so many drafts each."""
    rows = [RowStep(row, 0, 7, 1 + count, True, count) for row, count in enumerate(drafts)]
    return StepPlan(0, [], [], rows)


def paced(per_step: float, per_token: float, plans: list[StepPlan]) -> Pace:
    found = Pace()
    for plan in plans:
        found.observe(plan, per_step + per_token * plan.num_tokens)
    return found


@given(st.lists(st.tuples(counts, seconds), max_size=60), counts, st.floats(0, 100), seconds)
def test_whatever_was_seen_nobody_waits_longer_than_a_step_is_forecast(
    seen: list[tuple[list[int], float]], running: list[int], start: float, later: float
) -> None:
    found = Pace()
    for num_tokens, took in seen:
        found.observe(plan_of(*num_tokens), took)
        (found.met if took > 5 else found.missed)()
    forecast = found.forecast(plan_of(*running))
    assert forecast >= 0
    wait = found.wait(plan_of(*running), start, start + later)
    most = pace._MOST * forecast - pace._LEAD - later
    assert wait == 0 or pace._LEAST <= wait <= most + 1e-6


@given(st.floats(0.001, 1.0), st.floats(0.0, 0.01), st.lists(st.integers(2, 64), min_size=8))
def test_prices_are_found(per_step: float, per_token: float, tokens: list[int]) -> None:
    tokens = [*tokens, 1, 65]
    for plans in ([plan_of(*[1] * count) for count in tokens], [plan_of(1, n + 1) for n in tokens]):
        found = paced(per_step, per_token, plans)
        for plan in plans:
            expected = per_step + per_token * plan.num_tokens
            assert found.forecast(plan) == pytest.approx(expected, rel=1e-3)


def test_steps_with_prompts_say_nothing_of_those_without() -> None:
    found = paced(0.5, 0.001, [plan_of(1, 200), plan_of(1, 100)] * 4)
    assert found.forecast(plan_of(1, 200)) > 0.6
    assert found.forecast(plan_of(1, 1)) == 0.0
    for _ in range(4):
        found.observe(plan_of(1, 1), 0.02)
    assert found.forecast(plan_of(1, 1)) == pytest.approx(0.02)


def test_steps_that_verify_drafts_have_a_forecast_of_their_own() -> None:
    """By their rows: nobody knows yet how many of the drafts that a plan allows there will be."""
    found = paced(0.02, 0.0, [plan_of(1), plan_of(1, 1)] * 4)
    assert found.forecast(verifying(4, 4)) == 0.0
    for _ in range(4):
        found.observe(verifying(4, 4), 0.06)
    assert found.forecast(verifying(4, 4)) == pytest.approx(0.06)
    assert found.forecast(verifying(1, 9)) == pytest.approx(0.06)
    # One row with drafts makes the step longer for the others, and no prompt of it.
    assert found.forecast(verifying(0, 4)) == pytest.approx(0.06)
    assert found.forecast(plan_of(1, 1)) == pytest.approx(0.02)
    assert found.forecast(plan_of(1, 9)) == 0.0
    assert found.wait(verifying(4, 4), 5.0, 5.0) == pytest.approx(0.875 * 0.06 - 0.003)


def test_it_follows_a_device_that_becomes_faster() -> None:
    found = paced(0.1, 0.0, [plan_of(1)] * 200)
    assert found.forecast(plan_of(1)) == pytest.approx(0.1)
    for _ in range(30):
        found.observe(plan_of(1), 0.01)
    assert found.forecast(plan_of(1)) < 0.02


def test_of_few_steps_and_of_short_ones_nothing_is_waited_for() -> None:
    found = paced(0.1, 0.0, [plan_of(1)] * 3)
    assert found.wait(plan_of(1), 5.0, 5.0) == 0
    found.observe(plan_of(1), 0.1)
    # A part of 100 ms, less than the whole by what a loop may be late.
    assert found.wait(plan_of(1), 5.0, 5.0) == pytest.approx(0.875 * 0.1 - 0.003)
    assert found.wait(plan_of(1), 5.0, 5.08) == pytest.approx(0.0045)
    assert found.wait(plan_of(1), 5.0, 5.0841) == 0
    assert paced(0.004, 0.0, [plan_of(1)] * 9).wait(plan_of(1), 5.0, 5.0) == 0


def test_who_comes_too_late_is_earlier_until_it_was_in_time_for_long() -> None:
    found = paced(0.1, 0.0, [plan_of(1)] * 9)
    waits = [found.wait(plan_of(1), 5.0, 5.0)]
    for _ in range(3):
        found.missed()
        waits.append(found.wait(plan_of(1), 5.0, 5.0))
    assert all(later < 0.85 * earlier for earlier, later in pairwise(waits))
    for _ in range(30):
        found.met()
    assert waits[-1] < found.wait(plan_of(1), 5.0, 5.0) < waits[0]
    for _ in range(30):
        found.met()
    assert found.wait(plan_of(1), 5.0, 5.0) == waits[0]


class Asked:
    """What a pace asks a scheduler."""

    has_free_row = True
    has_work = True


def test_a_plan_that_was_timed_is_in_time_while_its_step_runs_and_late_behind_it() -> None:
    found, asked, running = paced(0.1, 0.0, [plan_of(1)] * 9), Asked(), plan_of(1)

    def decide(now: float, *, step: StepPlan | None = running) -> float:
        return found.decide(asked, step, 5.0, now)  # type: ignore[arg-type]

    whole = decide(5.0)
    assert whole == pytest.approx(0.0845)
    # The step that runs has ended when the loop turns: late, if there was something to plan.
    assert decide(5.2, step=None) == 0
    late = decide(5.0)
    assert late < 0.85 * whole
    asked.has_work = False
    assert decide(5.2, step=None) == 0
    assert decide(5.0) == late
    # It runs when the time has come: in time. Twice asked, once counted.
    assert decide(5.09) == decide(5.09) == 0
    sooner = decide(5.0)
    assert late < sooner < whole
    # Nobody who comes could be taken in.
    asked.has_free_row = False
    assert decide(5.0) == 0
