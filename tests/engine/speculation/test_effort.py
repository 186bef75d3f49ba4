"""A drafter that computes rests where its guesses bring nothing, and is tried again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from src.core.plan import RowInstall, RowStep, StepPlan
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.speculation import SURE, BatchDrafter, Guess, Speculation, effort
from src.engine.speculation.effort import Effort
from tests.engine.speculation.test_verification import FREE, POISON, buffer, plan

WINDOW, SHORTEST, LONGEST = effort._WINDOW, effort._SHORTEST, effort._LONGEST


def pass_by(effort_: Effort, steps: int, *, rows: int = 1, right: float = 0.0) -> int:
    """Steps in which a part of the tokens is guessed right; returns how many are rests."""
    rests = 0
    due = 0.0
    for _ in range(steps):
        effort_.begin(rows)
        rests += effort_.rests
        due += rows * right
        if not effort_.rests and due >= 1:
            effort_.verified(int(due))
            due -= int(due)
    return rests


def test_it_rests_longer_and_longer_where_no_guess_is_right() -> None:
    made = Effort()
    assert pass_by(made, WINDOW - 1) == 0
    length = SHORTEST
    for _ in range(5):
        assert pass_by(made, length) == length
        # It is tried for as long each time.
        assert pass_by(made, WINDOW) == 0
        length = min(2 * length, LONGEST)
    assert length == LONGEST


@pytest.mark.parametrize(("right", "rests"), [(0.05, False), (0.01, True)])
@pytest.mark.parametrize("rows", [1, 9])
def test_a_few_right_guesses_are_too_few(right: float, rests: bool, rows: int) -> None:
    assert bool(pass_by(Effort(), 4 * WINDOW, rows=rows, right=right)) == rests


def test_right_guesses_make_the_next_rest_short() -> None:
    made = Effort()
    pass_by(made, WINDOW + SHORTEST + WINDOW - 1)
    assert pass_by(made, 2 * SHORTEST) == 2 * SHORTEST
    assert pass_by(made, 2 * WINDOW, right=0.5) == 0
    while not made.rests:
        made.begin(1)
    assert pass_by(made, SHORTEST + WINDOW - 1) == SHORTEST - 1


def test_it_is_tried_sooner_where_fewer_rows_are_left() -> None:
    made = Effort()
    pass_by(made, WINDOW, rows=8)
    assert made.rests
    # A few small steps are no sign.
    for _ in range(3):
        assert pass_by(made, effort._FEWER - 1, rows=4) == effort._FEWER - 1
        assert pass_by(made, 1, rows=5) == 1
    assert pass_by(made, effort._FEWER + 50, rows=4) == effort._FEWER - 1


class Wrong(BatchDrafter):
    """Guesses 50; notes what it is told."""

    source = "wrong"
    wants_hidden = "all"

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0
        self.asked = 0
        self.rested: list[int] = []
        self.finished: list[list[int]] = []

    def rest(self) -> None:
        self.rested.append(self.computed)

    def finish(self, ends: Callable[[int], bool]) -> None:
        self.finished.append([row for row in range(3) if ends(row)])

    def compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        self.computed += 1
        self.asked += len(asked)
        self.guesses = {row: Guess([50], SURE, self.source) for row in asked}


def run(made: Speculation, steps: int) -> None:
    """Decode steps of a row, with drafts where they are of use."""
    for _ in range(steps):
        rests = made.rests(0)
        drafts = 0 if rests > 0 else 1
        step = RowStep(0, 1, 3, 1 + drafts, True, drafts, 0, 12 if drafts else 0)
        made._asking.finish(plan(step))
        verification = made.begin(plan(step))
        if verification is not None:
            made.settle(verification, [14] * (1 + verification.plan.num_drafts))
            made.observe(verification.plan, 1e-3 * (1 + verification.plan.num_drafts))
        else:
            made.observe(plan(step), 1e-3, verified=False)


def test_where_nothing_pays_neither_guesses_nor_reading_go_on() -> None:
    drafter = Wrong()
    made = Speculation((drafter,), buffer(4), FREE, POISON)
    run(made, WINDOW - 1)
    assert drafter.computed == WINDOW - 1
    assert made.hidden.wanted == "all"
    # A row that rests is woken by guesses that have held: these never do.
    assert 0 < drafter.asked < 20
    finished = len(drafter.finished)
    run(made, SHORTEST)
    assert drafter.rested == [WINDOW - 1]
    assert drafter.computed == WINDOW - 1
    assert len(drafter.finished) <= finished + 1
    assert made.hidden.wanted == "none"
    # Then it is tried: what was known of its guesses is forgotten.
    asked = drafter.asked
    run(made, WINDOW)
    assert drafter.computed == 2 * WINDOW - 1
    assert asked < drafter.asked < asked + 20
    run(made, 6 * LONGEST)
    assert drafter.computed < 6 * LONGEST / 5


def test_only_rows_that_go_on_keep_what_is_unread() -> None:
    """Not one that another request gets in this step."""
    drafter = Wrong()
    made = Speculation((drafter,), buffer(4), FREE, POISON)
    steps = [RowStep(row, 1, 0, 1, True) for row in (0, 1)]
    made.finish(StepPlan(1, [RowInstall(1, 2, 7, [5], 1, [[0]])], [], steps))
    assert drafter.finished == [[1, 2]]


def test_what_a_request_has_left_is_read_when_it_ends() -> None:
    """There may be no step for long."""
    drafter = Wrong()
    made = Speculation((drafter,), buffer(4), FREE, POISON)
    made.leave(0, DeviceRequest(key=1, prompt_len=3, params=SamplingParams()))
    assert drafter.finished == [[0]]


def test_a_row_of_a_failed_step_is_forgotten() -> None:
    vacated: list[int] = []
    drafter = Wrong()
    drafter.vacate = vacated.append  # type: ignore[method-assign]
    made = Speculation((drafter,), buffer(4), FREE, POISON)
    made.fail(plan(RowStep(0, 1, 3, 1, True)))
    assert vacated == [0]
