"""Drafts of the device: a plan's are lowered to what is worth it, by what came of those before."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import pytest
import torch

from src.core.plan import RowStep, StepPlan
from src.engine.speculation import Widths
from src.engine.speculation.on_device import Bounds, DeviceSpeculation


class Limits:
    def __init__(self) -> None:
        self.never: set[int] = set()
        # Row -> positions that the host must know.
        self.known: dict[int, int] = {}

    def never_drafts(self, row: int) -> bool:
        return row in self.never

    def may_draft(self, row: int, least: int, most: int) -> bool:
        return not least <= self.known.get(row, -1) <= most


class Came(NamedTuple):
    kept: int
    drafted: int
    match: int


def made(*, always: bool = True, max_sampled: int = 64) -> tuple[DeviceSpeculation, Limits]:
    limits = Limits()
    speculation = DeviceSpeculation(
        Bounds(3, 24), limits, max_sampled, 8, Widths(always=True) if always else None
    )
    for row in range(8):
        speculation.install(row, 1)
    return speculation, limits


def plan(*steps: RowStep) -> StepPlan:
    return StepPlan(1, [], [], list(steps))


def drafting(row: int, drafts: int = 4, slack: int = 0, start: int = 9) -> RowStep:
    return RowStep(row, 1, start, 1 + drafts, True, drafts, slack, 40)


def decoding(row: int) -> RowStep:
    return RowStep(row, 1, 9, 1, True)


def test_an_exact_plan_is_left_as_it_is() -> None:
    speculation, _ = made()
    exact = plan(decoding(0), RowStep(1, 1, 0, 5, False))
    assert speculation.begin(exact) is exact


def test_rows_with_bounds_come_last() -> None:
    speculation, _ = made()
    steps = drafting(0), decoding(1), RowStep(2, 1, 9, 1, True, 0, 3, 40), decoding(3)
    launched = speculation.begin(plan(*steps))
    assert launched.rows == [steps[1], steps[3], steps[0], steps[2]]


def test_beside_a_prompt_nobody_drafts_and_bounds_stay() -> None:
    speculation, _ = made()
    chunk = RowStep(5, 1, 0, 7, False)
    launched = speculation.begin(plan(drafting(0), drafting(1, slack=2), chunk))
    # A row whose beginning is known is as exact as one that was never to draft.
    behind = RowStep(1, 1, 9, 1, True, 0, 2, 40)
    assert launched.rows == [decoding(0), chunk, behind]


def test_who_may_not_draft_has_none() -> None:
    speculation, limits = made()
    limits.never.add(0)
    speculation.install(0, 1)
    limits.known = {1: 14, 2: 15, 3: 9}
    launched = speculation.begin(plan(*(drafting(row) for row in range(4))))
    # Row 1 samples positions 10 to 14; of row 2 nothing is known at those, nor of row 3.
    assert launched.rows == [decoding(0), decoding(1), drafting(2), drafting(3)]
    assert speculation.rests(drafting(0)) > 1000
    assert speculation.rests(drafting(2)) == 0


@pytest.mark.parametrize(("max_sampled", "drafts"), [(64, 4), (9, 2), (5, 0)])
def test_a_step_samples_no_more_positions_than_it_may(max_sampled: int, drafts: int) -> None:
    speculation, _ = made(max_sampled=max_sampled)
    launched = speculation.begin(plan(*(drafting(row) for row in range(3))))
    assert [step.drafts for step in launched.rows] == [drafts] * 3
    assert all(step.num_tokens == 1 + step.drafts for step in launched.rows)


def measured(speculation: DeviceSpeculation) -> None:
    """Drafts are cheap: steps take no longer with them."""
    for _ in range(20):
        speculation.took(1, 1, 1e-2)
        speculation.took(1, 5, 1.02e-2)


def drafts_of(speculation: DeviceSpeculation) -> int:
    return speculation.begin(plan(drafting(0))).num_drafts


def test_wrong_drafts_make_a_row_rest_until_something_is_found() -> None:
    speculation, _ = made(always=False)
    measured(speculation)
    assert drafts_of(speculation) > 0
    step_plan = plan(drafting(0))
    speculation.settle(step_plan, [Came(1, 4, 5)])
    assert speculation.counts.drafted == 4
    assert speculation.rests(drafting(0)) > 1000
    # It rests in exact steps, and is looked at when its pause has ended.
    for _ in range(80):
        speculation.begin(plan(decoding(0)))
        if due := speculation.due(plan(decoding(0))):
            break
    assert due == [decoding(0)]
    speculation.looked(due, [0], 1)
    assert speculation.rests(drafting(0)) > 1000
    for _ in range(200):
        speculation.begin(plan(decoding(0)))
        if due := speculation.due(plan(decoding(0))):
            break
    speculation.looked(due, [20], 1)
    assert speculation.rests(drafting(0)) <= 0
    assert speculation.rests(drafting(0)) == 0


def test_right_drafts_go_on() -> None:
    speculation, _ = made(always=False)
    measured(speculation)
    for _ in range(30):
        step_plan = speculation.begin(plan(drafting(0)))
        speculation.took(1, 1 + step_plan.num_drafts, 1e-2 * (1 + step_plan.num_drafts / 100))
        if step_plan.num_drafts:
            count = step_plan.num_drafts
            speculation.settle(step_plan, [Came(1 + count, count, 9)])
        assert speculation.rests(drafting(0)) == 0
    assert speculation.counts.drafted == speculation.counts.accepted > 40


def test_what_came_of_an_owner_before_says_nothing_of_the_row() -> None:
    speculation, _ = made(always=False)
    step_plan = plan(drafting(0))
    speculation.install(0, 2)
    speculation.settle(step_plan, [Came(1, 4, 5)])
    # It is counted, as it was computed.
    assert speculation.counts.drafted == 4
    assert speculation.rests(RowStep(0, 2, 9, 1, True)) == 0
    assert speculation.rests(drafting(0)) == 0


def test_a_row_that_had_ended_is_not_counted() -> None:
    speculation, _ = made(always=False)
    speculation.settle(
        plan(drafting(0), drafting(1)), [Came(0, -1, 0), Came(3, 4, 5), Came(0, -1, 0)]
    )
    assert (speculation.counts.rows, speculation.counts.accepted) == (1, 2)
    assert speculation.rests(drafting(0)) == 0


def test_look_ups_have_its_bounds() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 1, 2, 3, -1]], dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    for least, found in ((3, [3, 1, 4]), (4, [0, 0, -1])):
        propose = Bounds(least, 24).proposing(1)
        assert propose(tokens, torch.tensor([0]), 7 * one, one).tolist() == [found]


def test_a_row_that_was_launched_without_drafts_is_exact_behind() -> None:
    """The scheduler allowed it some, so it says bounds until that step is committed."""
    speculation, limits = made()
    limits.known = {0: 12}
    first = speculation.begin(plan(drafting(0, start=9), drafting(1, start=9)))
    assert first.rows == [decoding(0), drafting(1, start=9)]
    # Each has one token more at least, and five at most as far as the scheduler knows.
    limits.known = {0: 12, 1: 12}
    behind = [drafting(row, slack=4, start=10) for row in (0, 1)]
    second = speculation.begin(plan(*behind))
    exact = RowStep(0, 1, 10, 1, True)
    assert second.rows == [exact, RowStep(1, 1, 10, 1, True, 0, 4, 40)]
    # Nothing restricts them from here on: the first is known to the host, the other is not.
    limits.known = {}
    third = speculation.begin(plan(*(drafting(row, slack=8, start=11) for row in (0, 1))))
    assert third.rows == [drafting(0, start=11), drafting(1, slack=4, start=11)]
    speculation.install(1, 1)
    fresh = speculation.begin(plan(drafting(1, slack=3, start=20)))
    assert fresh.rows == [drafting(1, slack=3, start=20)]


def test_bounds_end_at_the_limit() -> None:
    speculation, _ = made()
    near = RowStep(0, 1, 35, 4, True, 3, 0, 40)
    assert speculation.begin(plan(near)).rows == [near]
    behind = RowStep(0, 1, 36, 3, True, 2, 9, 40)
    # It has 37 to 40 tokens, and with 40 it has ended.
    assert speculation.begin(plan(behind)).rows == [RowStep(0, 1, 36, 3, True, 2, 3, 40)]


def test_what_makes_all_steps_with_drafts_fail_ends_them(caplog: pytest.LogCaptureFixture) -> None:
    speculation, _ = made()

    def launch(*, fails: bool) -> None:
        with contextlib.suppress(RuntimeError), speculation.launching():
            if fails:
                raise RuntimeError("no memory")

    # Only if none in between is launched.
    for fails in (True, True, False, True, True):
        launch(fails=fails)
        assert drafts_of(speculation) == 4
    launch(fails=True)
    assert drafts_of(speculation) == 0
    launch(fails=False)
    launch(fails=True)
    assert drafts_of(speculation) == 0
    assert speculation.rests(drafting(0)) > 1000
    assert not speculation.due(plan(decoding(0)))
    assert caplog.messages == ["nothing drafts any more: steps with drafts fail: no memory"]


def test_rows_have_as_many_drafts_as_pay_where_all_take_the_place_of_the_widest() -> None:
    speculation, _ = made(always=False)
    # Four rows: steps with a draft each take hardly longer, those with seven each thrice as long.
    for _ in range(40):
        speculation.took(4, 1, 1e-2)
        speculation.took(4, 2, 1.02e-2)
        speculation.took(4, 4, 1.9e-2)
        speculation.took(4, 8, 3e-2)
    launched = speculation.begin(plan(*(drafting(row, drafts=12) for row in range(4))))
    assert [step.drafts for step in launched.rows] == [1] * 4
    # Beside three that have none it would make all of them longer for one.
    rows = [drafting(0, drafts=12), *(decoding(row) for row in range(1, 4))]
    assert speculation.begin(plan(*rows)).num_drafts == 0


def test_no_step_is_wider_than_those_that_are_captured() -> None:
    speculation, _ = made(always=False, max_sampled=12)
    for _ in range(40):
        speculation.took(4, 1, 1e-2)
        speculation.took(4, 2, 1.001e-2)
    launched = speculation.begin(plan(*(drafting(row, drafts=2) for row in range(4))))
    # Three tokens of each would be allowed, in a step of four of each, which is not.
    assert [step.drafts for step in launched.rows] == [1] * 4
