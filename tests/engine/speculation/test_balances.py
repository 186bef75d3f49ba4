"""What rows gain and lose by drafts, their own and those of others."""

from __future__ import annotations

import pytest

from src.engine.speculation.balances import Balances


def test_rows_that_are_many_bear_little_and_all_of_it_where_none_lacks_a_guess() -> None:
    balances = Balances()
    assert balances.bearable((), 0, 8) == float("inf")
    assert balances.bearable((), 8, 8) == pytest.approx(0.02)
    assert balances.bearable((), 1, 8) == pytest.approx(0.16)


def test_a_request_loses_a_hundredth_of_its_steps_and_then_what_it_has_gained() -> None:
    balances = Balances()
    balances.vacate(3)
    assert balances.bearable([3], 1, 8) == pytest.approx(0.16)
    balances.begin(50)
    assert balances.bearable([3], 1, 8) == pytest.approx(0.5)
    balances.begin(200)
    assert balances.bearable([3], 1, 8) == 1.0
    balances.lost([3], 0.5)
    assert balances.bearable([3], 1, 8) == 0.5
    balances.lost([3], 0.75)
    # Nothing is owed.
    assert balances.bearable([3], 1, 8) == pytest.approx(0.16)
    balances.gained(3, 4)
    balances.begin(10)
    assert balances.bearable([3], 1, 8) == 4.0
    balances.gained(3, 400)
    assert balances.bearable([3], 1, 8) == 8.0


def test_whoever_has_least_decides() -> None:
    balances = Balances()
    balances.gained(1, 6)
    balances.begin(30)
    assert balances.bearable([1], 2, 64) == 6.0
    assert balances.bearable([1, 2], 2, 8) == pytest.approx(0.3)


def test_the_next_request_of_a_row_begins_anew() -> None:
    balances = Balances()
    balances.gained(1, 5)
    balances.begin(300)
    balances.vacate(1)
    assert balances.bearable([1], 1, 8) == pytest.approx(0.16)
    balances.begin(40)
    assert balances.bearable([1], 1, 8) == pytest.approx(0.4)
