"""How many guesses are verified: what pays, and nothing where nothing does."""

from __future__ import annotations

from itertools import pairwise

from src.engine.speculation import Guess, Widths

SURE = Guess([1] * 16, 20)
VAGUE = Guess([1] * 16, 1)


def priced(per_step: float, per_token: float) -> Widths:
    widths = Widths()
    for tokens in (1, 4, 9, 2, 17, 1, 6, 3):
        widths.took(tokens, per_step + per_token * tokens)
    return widths


def test_free_drafts_are_all_taken_and_dear_ones_not() -> None:
    assert priced(0.01, 0.0).choose([SURE], 1, 1) == [16]
    assert priced(0.0, 0.01).choose([SURE], 1, 1) == [0]
    assert priced(0.0, 0.01).none_pays(1)
    assert not priced(0.01, 0.001).none_pays(1)


def test_the_dearer_a_token_the_fewer_drafts() -> None:
    counts = [priced(0.01, price).choose([SURE], 1, 1)[0] for price in (1e-4, 1e-3, 3e-3, 6e-3)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_the_likelier_row_gets_more() -> None:
    sure, vague = priced(0.01, 0.0015).choose([SURE, VAGUE], 2, 2)
    assert sure > vague


def test_a_row_pays_little_for_its_neighbours() -> None:
    widths = priced(0.01, 0.001)
    alone = widths.choose([SURE], 1, 1)[0]
    among = widths.choose([SURE], 8, 8)[0]
    assert alone > among
    # Eight rows take 18 ms, a draft takes 1.
    assert among * 0.001 <= 0.05 * 0.018 + 0.001


def test_rejected_guesses_become_unlikely_and_right_ones_likely() -> None:
    widths = priced(0.01, 0.002)
    before = widths.choose([SURE], 1, 1)[0]
    for row in range(40):
        widths.verified(row, SURE.match, 16, 0)
    assert widths.choose([SURE], 1, 1) == [0] != [before]
    # Guesses of short matches are counted apart.
    for row in range(40):
        widths.verified(row, VAGUE.match, 16, 16)
    assert widths.choose([VAGUE], 1, 1)[0] >= before


def test_a_row_that_fails_is_asked_rarely_and_again() -> None:
    widths = Widths()
    asked = []
    for step in range(1000):
        widths.begin()
        if widths.asks(3):
            asked.append(step)
            widths.verified(3, 5, 4, 0)
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps == sorted(gaps)
    assert max(gaps) == 65
    assert len(asked) < 30
    widths.vacate(3)
    assert widths.asks(3)


def test_a_row_without_guesses_is_asked_sooner() -> None:
    widths = Widths()
    asked = 0
    for _ in range(900):
        widths.begin()
        if widths.asks(3):
            asked += 1
            widths.found_nothing(3)
    assert 90 <= asked <= 130


def test_success_ends_the_pause() -> None:
    widths = Widths()
    for _ in range(5):
        widths.begin()
        widths.verified(3, 5, 4, 0)
    widths.begin()
    assert not widths.asks(3)
    assert widths.rests(3) == 16
    widths.verified(3, 5, 4, 2)
    assert widths.asks(3)


def test_before_prices_are_known_likely_guesses_are_tried() -> None:
    widths = Widths()
    assert not widths.none_pays(1)
    assert 0 < widths.choose([SURE], 1, 1)[0] < 16
    assert widths.choose([VAGUE], 1, 1) == [0]
