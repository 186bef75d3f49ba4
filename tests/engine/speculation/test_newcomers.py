"""Whoever comes while others decode hardly waits longer for their drafts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from src.core.plan import RowInstall, RowStep, StepPlan
from src.engine.speculation import Guess, Widths
from src.engine.speculation.newcomers import Newcomers
from src.engine.speculation.on_device import Bounds, DeviceSpeculation
from src.engine.speculation.verification import Speculation

ROWS, POISON = 8, -1
GUESS = Guess([1] * 8, 20, "suffix")


def install(row: int, prompt: int = 9, output: int = 0) -> RowInstall:
    return RowInstall(row, 1, 100 + row, [1] * (prompt + output), prompt, [[0]])


def decoding(row: int, drafts: int = 0) -> RowStep:
    return RowStep(row, 1, 9, 1 + drafts, True, drafts, 0, 40)


def prompt(row: int, tokens: int = 9) -> RowStep:
    return RowStep(row, 1, 0, tokens, True)


def step(number: int, installs: Sequence[RowInstall], *rows: RowStep) -> StepPlan:
    return StepPlan(number, list(installs), [], list(rows))


@pytest.mark.parametrize(
    ("plan", "joined"),
    [
        (step(5, [install(3)], decoding(0), prompt(3)), True),
        (step(5, [install(3)], decoding(0, drafts=4), prompt(3)), True),
        # All but a prompt's last token was cached.
        (step(5, [install(3)], decoding(0), prompt(3, 1)), True),
        # Nobody decodes.
        (step(5, [install(3)], prompt(3)), False),
        (step(5, [install(3)], prompt(3, 1)), False),
        (step(5, [install(3)], prompt(0), prompt(3)), False),
        # It goes on behind a preemption.
        (step(5, [install(3, output=1)], decoding(0), prompt(3)), False),
        (step(5, [install(2, output=1), install(3)], decoding(0), prompt(3)), True),
        # No row was free, so it has waited for one.
        (step(5, [install(7)], *map(decoding, range(7)), prompt(7)), False),
        (step(5, [install(6)], *map(decoding, range(6)), prompt(6)), True),
    ],
)
def test_a_newcomer_joins_rows_that_decode(plan: StepPlan, joined: bool) -> None:
    assert Newcomers(ROWS).joined(plan) == joined


def test_requests_of_a_burst_wait_for_its_prompts() -> None:
    newcomers = Newcomers(ROWS)
    steps = [step(5, [install(0)], prompt(0))]
    steps += [step(5 + n, [install(n)], decoding(0), prompt(n)) for n in range(1, 6)]
    # Who comes in every step behind that is no burst: steps may be long.
    assert [newcomers.joined(each) for each in steps] == [False] * 3 + [True] * 3


class Served(NamedTuple):
    """What rows have seen that repeat themselves, and requests that came meanwhile.

    Of the second half of the steps: until then it is found out what drafts cost, and who comes.

    ``rate``: tokens of each row in the time of a step without drafts; ``wait``: of a newcomer for
    the end of the running step, in such times; ``longest``: step.
    """

    rate: float
    wait: float
    longest: float


def served(
    rows: int, price: float, every: float | None, steps: int = 2000, until: float = float("inf")
) -> Served:
    """Serve rows of which every guess is right; each draft makes a step longer by ``price``.

    Somebody comes every so many times of a step without drafts, ``until`` then.
    """
    widths, now, longest = Widths(), 0.0, 0.0
    tokens, taken = 0, 0.0
    waits: list[float] = []
    counted = 0
    coming = every or float("inf")
    joins = False
    for step in range(steps):
        widths.begin()
        if step == steps // 2:
            tokens, taken, counted = 0, 0.0, len(waits)
        if joins:
            widths.joined()
        asked = [row for row in range(rows) if widths.asks(row)]
        chosen = [0] * len(asked)
        if widths.none_pays(rows):
            for row in asked:
                widths.nothing_pays(row)
        elif asked and widths.may_draft(rows):
            chosen = widths.choose([GUESS] * len(asked), rows, rows)
            for row, width in zip(asked, chosen, strict=True):
                if width:
                    widths.verified(row, Guess([1] * width, 20, "suffix"), width)
                else:
                    widths.nothing_pays(row)
        drafts = sum(chosen)
        duration = 1 + price * drafts
        widths.took(rows + drafts, drafts, duration)
        end = now + duration
        joins = False
        while coming < end:
            waits.append(end - coming)
            # Not always at the same place of a step.
            coming += (every or 0) * (0.75 + 0.5 * (len(waits) * 0.618 % 1))
            joins = True
            if coming > until:
                coming = float("inf")
        now, longest = end, max(longest, duration)
        tokens, taken = tokens + rows + drafts, taken + duration
    return Served(tokens / taken / rows, statistics.fmean(waits[counted:] or [0]), longest)


@pytest.mark.parametrize(("rows", "price"), [(7, 0.05), (7, 0.08), (7, 0.1), (16, 0.03)])
@pytest.mark.parametrize("every", [8, 64])
def test_a_newcomer_waits_hardly_longer(rows: int, price: float, every: float) -> None:
    # Without drafts it waits for half a step.
    assert served(rows, price, every).wait < 0.65


@pytest.mark.parametrize(
    ("rows", "price", "rate"), [(1, 0.05, 6.0), (4, 0.05, 2.9), (7, 0.02, 3.4), (7, 0.05, 1.6)]
)
def test_where_nobody_comes_drafts_bring_what_they_did(
    rows: int, price: float, rate: float
) -> None:
    assert served(rows, price, None).rate > rate
    # And hardly less where somebody comes in every thousandth step.
    assert served(rows, price, 1000).rate > 0.85 * rate


def test_drafts_come_back_when_nobody_comes_any_more() -> None:
    rows, price = 7, 0.05
    beside, behind = served(rows, price, 8), served(rows, price, 8, until=150)
    assert beside.rate < 1.1
    assert behind.rate > 1.7 * beside.rate


def test_what_drafts_cost_is_tried_whoever_comes() -> None:
    widths = Widths()
    for _ in range(40):
        widths.begin()
        widths.joined()
        widths.took(8, 0, 0.01)
    assert not widths.none_pays(8)
    drafts = sum(widths.choose([GUESS] * 8, 8, 8))
    assert drafts > 0
    # Where it was seen that a draft costs two thirds of what it brings, nobody is asked.
    widths.took(8 + drafts, drafts, 0.01 * (1 + drafts / 12))
    assert widths.none_pays(8)


@pytest.mark.parametrize("times", [10, 2000])
def test_many_newcomers_are_forgotten_as_soon_as_a_few(times: int) -> None:
    widths = Widths()
    for _ in range(times):
        widths.begin()
        widths.joined()
    # What one draft costs is known.
    for drafts in (0, 1):
        widths.took(8 + drafts, drafts, 0.01)
    assert widths._power(8) > 1.9
    widths.begin(512)
    assert widths._power(8) < 1.3


@pytest.mark.parametrize("every", [8, 64])
def test_one_row_keeps_its_drafts(every: float) -> None:
    alone, beside = served(1, 0.06, None), served(1, 0.06, every)
    assert beside.rate > 0.95 * alone.rate > 5


def test_drafts_that_hardly_pay_make_no_step_several_times_as_long() -> None:
    found = served(7, 0.08, None)
    assert found.rate > 1.1
    assert found.longest < 3.5


def test_what_steps_cost_is_found_out_although_somebody_comes() -> None:
    """The price is assumed to be half of what a row costs, and is nearly nothing."""
    assert served(7, 0.005, 8).rate > 4


class Ones:
    """Guesses ones."""

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess:
        return Guess([1] * most, 20, "suffix")


class Free:
    def leaves_free(self, row: int, position: int) -> bool:
        return True

    def never_drafts(self, row: int) -> bool:
        return False

    def may_draft(self, row: int, least: int, most: int) -> bool:
        return True

    def draft(self, wanted: object) -> list[list[int]]:
        raise AssertionError


def test_nobody_pays_for_drafts_of_others_in_its_own_step() -> None:
    widths = Widths()
    made = Speculation((Ones(),), np.full((ROWS + 1, 40), 1, np.int32), Free(), POISON, widths)
    for rows in (1, 2):
        widths.took(rows, 0, 0.01)
    alone = made.begin(step(1, [], decoding(0, drafts=4)))
    joined = made.begin(step(3, [install(1, 1)], decoding(0, drafts=4), prompt(1, 1)))
    behind = made.begin(step(4, [], decoding(0, drafts=4)))
    assert alone is not None
    assert joined is not None
    assert behind is not None
    found = [plan.num_drafts > 0 for plan in (alone.plan, joined.plan, behind.plan)]
    assert found == [True, False, True]


def test_newcomers_are_seen_by_whoever_drafts() -> None:
    on_host, on_device = Widths(), Widths()
    buffer = np.full((ROWS + 1, 40), 1, np.int32)
    host = Speculation((Ones(),), buffer, Free(), POISON, on_host)
    device = DeviceSpeculation(Bounds(3, 24), Free(), 64, ROWS, on_device)
    joined: list[Widths] = []
    for widths in (on_host, on_device):
        widths.joined = lambda widths=widths: joined.append(widths)  # type: ignore[method-assign]
    for plan in (
        step(1, [install(0)], prompt(0)),
        step(2, [], decoding(0, drafts=4)),
        step(4, [install(1)], decoding(0, drafts=4), prompt(1)),
    ):
        host.begin(plan)
        device.begin(plan)
    assert joined == [on_host, on_device]


def test_on_a_device_nobody_pays_in_its_own_step_either() -> None:
    widths = Widths()
    made = DeviceSpeculation(Bounds(3, 24), Free(), 64, ROWS, widths)
    for row in range(2):
        made.install(row, 1)
    for rows in (1, 2):
        widths.took(rows, 0, 0.01)
    plans = [
        step(1, [], decoding(0, drafts=4)),
        step(3, [install(1, 1)], decoding(0, drafts=4), prompt(1, 1)),
        step(4, [], decoding(0, drafts=4)),
    ]
    assert [made.begin(plan).num_drafts > 0 for plan in plans] == [True, False, True]
