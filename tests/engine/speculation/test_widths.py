"""How many guesses are verified: what pays, and nothing where nothing does."""

from __future__ import annotations

from itertools import pairwise

import pytest

from src.engine.speculation import Guess, Widths
from src.engine.speculation.chances import Chances
from src.engine.speculation.costs import Costs
from src.engine.speculation.probes import Probes

SURE = Guess([1] * 16, 20, "suffix")
VAGUE = Guess([1] * 16, 1, "suffix")


def priced(per_step: float, per_token: float) -> Widths:
    widths = Widths()
    for _ in range(60):
        widths.begin()
        for rows in (1, 2, 8, 32):
            for drafts in (0, 1, 2, 4, 8, 16, 32):
                widths.took(rows + drafts, drafts, per_step + per_token * (rows + drafts))
    return widths


def test_free_drafts_are_all_taken_and_dear_ones_not() -> None:
    free = priced(0.01, 0.0)
    for _ in range(8):
        free.verified(0, SURE, 16)
    assert free.choose([SURE], 1, 1) == [16]
    assert priced(0.0, 0.01).choose([SURE], 1, 1) == [0]
    assert priced(0.0, 0.01).none_pays(1)
    assert not priced(0.01, 0.001).none_pays(1)


@pytest.mark.parametrize("rows", [1, 8])
def test_nobody_is_asked_where_a_sure_draft_costs_most_of_what_it_brings(rows: int) -> None:
    # A draft costs half of a token of the step, and then two thirds.
    assert not priced(0.01 * rows, 0.01).none_pays(rows)
    assert priced(0.005 * rows, 0.01).none_pays(rows)


def test_the_dearer_a_token_the_fewer_drafts() -> None:
    counts = [priced(0.01, price).choose([SURE], 1, 1)[0] for price in (1e-4, 1e-3, 3e-3, 6e-3)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_what_a_wrong_draft_makes_again_is_part_of_its_price() -> None:
    widths = priced(0.01, 0.0025)
    free = widths.choose([SURE], 1, 1)[0]
    near = widths.choose([SURE], 1, 1, [1])[0]
    far = widths.choose([SURE], 1, 1, [9])[0]
    assert free > near > far
    assert priced(0.01, 0.0).choose([SURE], 1, 1, [9])[0] > far


def test_the_likelier_row_gets_more() -> None:
    sure, vague = priced(0.01, 0.0015).choose([SURE, VAGUE], 2, 2)
    assert sure > vague


def test_a_row_pays_little_for_its_neighbours() -> None:
    widths = priced(0.01, 0.0001)
    alone = widths.choose([SURE], 1, 1)[0]
    among = widths.choose([SURE], 8, 8)[0]
    assert alone > among > 0
    # Eight rows take 10.8 ms, a draft takes 0.1.
    assert among * 0.0001 <= 0.025 * 0.0108
    assert priced(0.01, 0.001).choose([SURE], 8, 8) == [0]
    # Where one of eight has none, it has to bear more.
    assert sum(priced(0.01, 0.001).choose([SURE] * 7, 8, 8)) > 1


def test_nothing_is_drafted_before_it_is_known_what_a_step_takes() -> None:
    widths = Widths()
    assert not widths.may_draft(1)
    widths.took(1, 0, 0.01)
    assert widths.may_draft(1)
    assert not widths.may_draft(2)
    # One likely guess is worth a try then, and in a large step none is.
    assert widths.choose([SURE], 1, 1)[0] > 0
    assert widths.choose([VAGUE], 1, 1)[0] <= 1
    assert not widths.none_pays(1)
    assert widths.none_pays(32)


def test_steps_without_drafts_are_measured_again() -> None:
    widths = Widths()
    widths.took(3, 0, 0.01)
    unmeasured = []
    for step in range(300):
        widths.begin()
        if widths.may_draft(3):
            widths.took(5, 2, 0.011)
        else:
            unmeasured.append(step)
            widths.took(3, 0, 0.01)
    assert len(unmeasured) == 4


def test_a_large_step_is_probed_rarely_and_its_price_believed() -> None:
    widths, drafted = Widths(), []
    for step in range(3000):
        widths.begin()
        widths.took(32, 0, 0.010)
        if not widths.none_pays(32) and (drafts := sum(widths.choose([SURE] * 32, 32, 32))):
            drafted.append((step, drafts))
            # Here drafts are nearly free.
            widths.took(32 + drafts, drafts, 0.010 + 0.00001 * drafts)
    assert drafted[0][0] >= 100
    assert drafted[0][1] <= 4
    assert drafted[-1][1] > 32


@pytest.mark.parametrize("right", [0, 1, 16])
@pytest.mark.parametrize(("rows", "price"), [(32, 1 / 32), (32, 1 / 16), (8, 1 / 8), (8, 2 / 3)])
def test_where_drafts_do_not_pay_only_probes_are_left(rows: int, price: float, right: int) -> None:
    widths, probes, tokens, taken = Widths(), 0, 0, 0.0
    for _ in range(6000):
        widths.begin()
        tokens, drafts = tokens + rows, 0
        if widths.may_draft(rows) and not widths.none_pays(rows):
            chosen = widths.choose([SURE] * rows, rows, rows)
            drafts, probes = sum(chosen), probes + any(chosen)
            for row, width in enumerate(chosen):
                if width:
                    accepted = min(width, right)
                    widths.verified(row, Guess([1] * width, 20, "suffix"), accepted)
                    tokens += accepted
        duration = 1 + price * drafts
        # A probe makes a step up to four times as long, at the price that is assumed at first.
        assert duration < 1 + 3 * price * (rows + 4) + 1e-9
        widths.took(rows + drafts, drafts, 0.01 * duration)
        taken += duration
    assert (4 if right else 1) <= probes < 6000 / 100
    # Half a hundredth of the time, and what it takes to find that out.
    assert tokens / taken / rows > 0.992


@pytest.mark.parametrize(("steps", "least", "most"), [(1.5, 13, 22), (7, 6, 9)])
def test_the_more_a_try_loses_the_more_seldom_it_is_made(
    steps: float, least: int, most: int
) -> None:
    widths, tries = Widths(), []
    for step in range(6000):
        widths.begin()
        # What asking takes is part of it.
        drafts = widths.choose([SURE], 1, 1)[0] if widths.may_draft(1) else 0
        widths.took(1 + drafts, drafts, 0.01 * (1 + steps * drafts))
        if drafts:
            # At first it is not known what a draft costs.
            tries += [step] if step > 100 else []
            widths.verified(0, Guess([1] * drafts, 20, "suffix"), 0)
            for _ in range(3):
                widths.verified(1, Guess([1], 20, "suffix"), 1)
    assert least <= len(tries) <= most


@pytest.mark.parametrize(("guessing", "rate"), [(8, 1.5), (7, 0.98)])
def test_many_drafts_are_tried_where_one_alone_is_dear(guessing: int, rate: float) -> None:
    """A lone draft costs more than what it brings, and each of many costs half of it.

    Not where the eighth row has none: it would wait too long.
    """
    widths, tokens, taken = Widths(), 0, 0.0
    for step in range(2000):
        widths.begin()
        chosen = [0]
        if widths.may_draft(8) and not widths.none_pays(8):
            chosen = widths.choose([SURE] * guessing, 8, 8)
        drafts = sum(chosen)
        duration = 1 + (0.15 if drafts < 8 else 0.06) * drafts
        widths.took(8 + drafts, drafts, 0.01 * duration)
        for row, width in enumerate(chosen):
            if width:
                widths.verified(row, Guess([1] * width, 20, "suffix"), width)
        if step >= 600:
            tokens, taken = tokens + 8 + drafts, taken + duration
    assert tokens / taken / 8 > rate


def test_a_step_with_many_drafts_tells_more_of_what_each_costs() -> None:
    costs = Costs()
    costs.took(8, 0, 0.01)
    for drafts in (1, 64):
        costs.took(8, drafts, 0.01 * (1 + 0.02 * drafts))
    assert costs.price(8, 64) == pytest.approx(0.02, rel=0.6)
    assert costs.price(8, 1) > 2 * costs.price(8, 64)


def test_rejected_guesses_become_unlikely_and_right_ones_likely() -> None:
    widths = priced(0.01, 0.002)
    before = widths.choose([SURE], 1, 1)[0]
    for row in range(40):
        widths.verified(row, SURE, 0)
    assert widths.choose([SURE], 1, 1) == [0] != [before]
    # Guesses of short matches are counted apart, and so are those of another source.
    assert widths.choose([SURE._replace(source="prediction")], 1, 1)[0] > 0
    for row in range(40):
        widths.verified(row, VAGUE, 16)
    assert widths.choose([VAGUE], 1, 1)[0] >= before


def test_a_row_that_fails_is_asked_rarely_and_again() -> None:
    widths = Widths()
    asked = []
    for step in range(1000):
        widths.begin()
        if widths.asks(3):
            asked.append(step)
            widths.verified(3, Guess([1] * 4, 5), 0)
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert max(gaps) == 64
    assert gaps[-5:] == [64] * 5
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
    assert 100 <= asked <= 130


def test_asking_in_vain_takes_half_a_hundredth_of_the_time() -> None:
    counts = []
    for seconds in (0.0001, 0.0025, 0.01):
        widths, asked = Widths(), 0
        for _ in range(900):
            widths.begin()
            widths.took(4, 0, 0.01)
            if widths.asks(3):
                asked += 1
                widths.asked(4, seconds)
                widths.found_nothing(3)
        counts.append(asked)
    assert counts[0] > 100
    # A quarter of a step may be asked for in every 50th, and a whole one in every 64th.
    assert 15 <= counts[1] <= 30
    assert counts[2] <= 30


def test_rows_that_pause_are_asked_together() -> None:
    widths, steps = Widths(), []
    for step in range(1, 400):
        widths.begin()
        # Every row begins in another step.
        rows = [row for row in range(32) if step > row and widths.asks(row)]
        for row in rows:
            widths.found_nothing(row)
        if rows and step > 100:
            steps.append(step)
    assert len(steps) <= 40


def test_success_ends_the_pause() -> None:
    widths, guess = Widths(), Guess([1] * 4, 5)
    for _ in range(5):
        widths.begin()
        widths.verified(3, guess, 0)
    widths.begin()
    assert not widths.asks(3)
    assert 8 <= widths.rests(3) <= 16
    widths.verified(3, guess, 2)
    assert widths.asks(3)


def test_chances_go_by_the_place_among_the_guesses() -> None:
    chances = Chances()
    guess = Guess([1] * 8, 5, "suffix")
    for _ in range(60):
        chances.verified(guess, 2)
    found = chances.survivals(guess)
    assert found == sorted(found, reverse=True)
    assert found[1] > 0.8
    assert found[2] < found[1] / 2
    assert chances.first(guess) == pytest.approx(found[0])


def test_what_was_observed_long_ago_is_forgotten() -> None:
    chances = Chances()
    before = chances.first(SURE)
    for _ in range(60):
        chances.verified(SURE, 0)
    for steps, known in ((4000, True), (200, False)):
        for _ in range(steps):
            chances.begin()
        assert (chances.first(SURE) < before / 2) == known


def test_a_draft_costs_what_it_adds_to_steps_of_the_same_time() -> None:
    costs = Costs()
    duration = 0.01
    for _ in range(90):
        # Texts grow, and steps with them.
        duration *= 1.01
        costs.begin()
        costs.took(4, 0, duration)
        costs.took(4, 2, duration * 1.2)
    assert costs.price(4, 2) == pytest.approx(0.1, rel=0.4)
    # Of more drafts nothing is known yet, of larger steps neither.
    assert costs.price(4, 16) == costs.price(4, 2)
    assert costs.price(100, 2) == pytest.approx(1 / 104)
    assert costs.prices(4, 20) == [costs.price(4, count) for count in range(1, 21)]
    # Only what was measured is told, and of how many steps.
    assert costs.measured == [((3, 4), (2, 3), costs.price(4, 2), 90)]
    assert costs.usual_seconds == {4: pytest.approx(duration, rel=0.1)}
    # A clock that goes wrong makes no draft free.
    for _ in range(50):
        costs.took(4, 2, 0.001)
    assert costs.price(4, 2) > 0
    costs.took(1, 1, 0.001)
    costs.took(200, 0, 0.001)
    costs.took(200, 64, 0.002)
    assert [each[:2] for each in costs.measured] == [((3, 4), (2, 3)), ((129, None), (64, None))]


def shares_of_drafts(rows: int, guessing: int, steps: int, disturbed: range) -> list[bool]:
    """Whether each step has drafts, where they are nearly free but for some steps."""
    widths, found = Widths(), []
    for step in range(steps):
        widths.begin()
        drafts = 0
        if step % 8 and not widths.none_pays(rows) and widths.may_draft(rows):
            drafts = sum(widths.choose([SURE] * guessing, rows, rows))
        times = 3 if drafts and step in disturbed else 1
        widths.took(rows + drafts, drafts, times * 0.01 * (1 + 0.002 * drafts))
        found.append(drafts > 0)
    return found


@pytest.mark.parametrize(("rows", "guessing"), [(1, 1), (8, 1), (16, 4)])
def test_free_drafts_of_some_rows_are_found_out(rows: int, guessing: int) -> None:
    """One draft alone may seem dear to its neighbours: two are tried, and one again, in turns."""
    assert sum(shares_of_drafts(rows, guessing, 4000, range(0))[-800:]) >= 600


@pytest.mark.parametrize(("rows", "guessing"), [(1, 1), (8, 8), (16, 4)])
def test_steps_that_were_disturbed_are_forgotten(rows: int, guessing: int) -> None:
    found = shares_of_drafts(rows, guessing, 8000, range(2000, 2060))
    assert sum(found[1200:2000]) >= 500
    assert sum(found[-800:]) >= 600


def test_what_hardly_pays_is_asked_for_until_that_was_seen() -> None:
    widths = Widths()
    for _ in range(3):
        widths.begin()
        widths.took(8, 0, 0.01)
    # A draft is assumed to cost two thirds of a token of these steps.
    assert not widths.none_pays(8)
    widths.took(9, 1, 0.01 * (1 + 1 / 12))
    assert widths.none_pays(8)


def test_a_price_that_was_hardly_measured_is_no_higher_than_that_of_fewer_drafts() -> None:
    costs = Costs()
    costs.took(8, 0, 0.01)
    # One step was disturbed.
    costs.took(8, 4, 0.03)
    for _ in range(30):
        costs.took(8, 1, 0.01 * 1.02)
    few = costs.price(8, 1)
    assert few < 0.05
    assert costs.price(8, 4) == few
    for times in range(7):
        assert costs.price(8, 4) == few, times
        costs.took(8, 4, 0.03)
    assert costs.price(8, 4) > 2 * few


def together(turns: int, steps: int = 1200) -> tuple[float, list[float]]:
    """Eight rows of which each has guesses but for one step in ``turns``, its own one.

    All guesses hold, and each draft makes the step longer by a twentieth. Returns tokens in the
    time of a step without drafts, and how much time each row has lost while it had no guess, less
    what drafts have saved it.
    """
    widths, tokens, taken = Widths(), 0, 0.0
    balances = [0.0] * 8
    for step in range(steps):
        widths.begin()
        rows = [row for row in range(8) if (step + row) % turns]
        others = [row for row in range(8) if row not in rows]
        chosen = [0] * len(rows)
        if widths.may_draft(8) and not widths.none_pays(8) and rows:
            chosen = widths.choose([SURE] * len(rows), 8, 8, others=others)
            widths.charge(range(8), 8, sum(chosen))
        longer = 0.05 * sum(chosen)
        widths.took(8 + sum(chosen), sum(chosen), 0.01 * (1 + longer))
        for row, width in zip(rows, chosen, strict=True):
            balances[row] += width - longer
            if width:
                widths.verified(row, Guess([1] * width, 20, "suffix"), width)
        for row in others:
            balances[row] -= longer
        tokens, taken = tokens + 8 + sum(chosen), taken + 1 + longer
    return tokens / taken, balances


def test_rows_that_repeat_themselves_by_turns_help_each_other() -> None:
    for turns in (4, 8):
        rate, balances = together(turns)
        assert rate > 1.5 * 8, turns
        assert min(balances) > 0, turns


def test_who_gains_nothing_pays_for_nobody() -> None:
    widths, lost, steps = Widths(), 0.0, 2000
    for _ in range(steps):
        widths.begin()
        widths.took(8, 0, 0.01)
        chosen = widths.choose([SURE] * 5, 8, 8, others=[5, 6, 7])
        widths.charge(range(8), 8, sum(chosen))
        if drafts := sum(chosen):
            widths.took(8 + drafts, drafts, 0.01 * (1 + 0.03 * drafts))
            lost += 0.03 * drafts
        for row, width in enumerate(chosen):
            if width:
                widths.verified(row, Guess([1] * width, 20, "suffix"), width)
    # Three of eight lose a tenth at most, but for what a request pays in advance.
    assert 0.02 < lost / steps < 0.02 * 8 / 3 + 0.01


def test_the_next_request_of_a_row_does_not_wait_for_what_the_last_one_gained() -> None:
    widths = priced(0.01, 0.002)
    widths.verified(1, SURE, 16)
    assert widths.choose([SURE], 2, 2, others=[1])[0] > 1
    widths.vacate(1)
    assert widths.choose([SURE], 2, 2, others=[1])[0] == 0


@pytest.mark.parametrize(("rows", "price"), [(2, 0.1), (8, 0.03), (8, 0.06)])
@pytest.mark.parametrize("length", [4, 16, 64])
def test_short_answers_do_not_pay_one_after_the_other(rows: int, price: float, length: int) -> None:
    """One row repeats itself, and the others have requests of so many tokens without guesses."""
    widths, lost, steps, others = Widths(), 0.0, 3000, list(range(1, rows))
    for step in range(steps):
        widths.begin()
        for row in others:
            if (step + row) % length == 0:
                widths.vacate(row)
        chosen = [0]
        if widths.may_draft(rows) and not widths.none_pays(rows):
            chosen = widths.choose([SURE], rows, rows, others=others)
            widths.charge(range(rows), rows, chosen[0])
        widths.took(rows + chosen[0], chosen[0], 0.01 * (1 + price * chosen[0]))
        if chosen[0]:
            widths.verified(0, Guess([1] * chosen[0], 20, "suffix"), chosen[0])
        lost += price * chosen[0]
    # A hundredth, and what drafts of others may always cost.
    assert lost / steps < 0.012 + 0.02 * rows / (rows - 1)


@pytest.mark.parametrize(("rows", "price"), [(4, 0.08), (1, 0.2), (8, 0.06)])
def test_tries_that_were_disturbed_do_not_keep_drafts_off(rows: int, price: float) -> None:
    widths, found = Widths(), []
    for step in range(4000):
        widths.begin()
        drafts = 0
        if widths.may_draft(rows) and not widths.none_pays(rows):
            drafts = sum(widths.choose([SURE] * rows, rows, rows))
        # At first steps with drafts take eight times as long as they should.
        times = 8 if drafts and step < 200 else 1
        if drafts:
            for row in range(rows):
                widths.verified(row, Guess([1], 20, "suffix"), 1)
        widths.took(rows + drafts, drafts, 0.01 * times * (1 + price * drafts))
        found.append(drafts > 0)
    assert sum(found[-1500:]) > 1000


@pytest.mark.parametrize(("rows", "price"), [(8, 0.3), (8, 2 / 3), (32, 1 / 16), (16, 1 / 4)])
def test_no_try_is_longer_than_four_steps_once_that_was_seen(rows: int, price: float) -> None:
    widths, longest = Widths(), []
    for _ in range(6000):
        widths.begin()
        drafts = 0
        if widths.may_draft(rows) and not widths.none_pays(rows):
            drafts = sum(widths.choose([SURE] * rows, rows, rows))
        widths.took(rows + drafts, drafts, 0.01 * (1 + price * drafts))
        if drafts:
            longest.append(1 + price * drafts)
            widths.verified(0, Guess([1] * drafts, 20, "suffix"), drafts)
    assert len(longest) > 8
    # What many cost is guessed a few times.
    assert sum(each > 4.3 for each in longest) <= 3
    assert max(longest[len(longest) // 2 :]) <= 4.3


def steps_between(probes: Probes, kind: int) -> int:
    """From the last try until guesses may be tried again in steps of this kind."""
    for steps in range(1, 2000):
        probes.begin(1)
        if probes.is_due(kind):
            return steps
    return 0


@pytest.mark.parametrize(("right", "steps"), [(0, 800), (2, 400), (3, 200), (4, 128)])
def test_right_drafts_of_a_try_are_not_lost(right: int, steps: int) -> None:
    probes = Probes()
    for _ in range(2):
        probes.begin(5000)
        probes.start()
        probes.verified(right)
        # Four steps longer, and the row has had a token of each right draft.
        probes.took(3, 4.0, 1)
    assert steps_between(probes, 3) == steps


def test_a_try_that_was_disturbed_does_not_count_nor_those_of_other_steps() -> None:
    probes = Probes()
    for longer, kind in ((0.0, 3), (4.0, 3), (4.0, 2), (4.0, 2)):
        probes.begin(5000)
        probes.start()
        probes.took(kind, longer, 1)
    assert steps_between(probes, 3) == 128
    assert steps_between(probes, 2) == 800 - 128


def test_what_is_no_try_loses_nothing() -> None:
    probes = Probes()
    for _ in range(3):
        probes.begin(200)
        probes.start()
        # Its step has failed.
        probes.begin(1)
        probes.took(3, 4.0, 1)
    probes.begin(128)
    assert probes.is_due(3)


def test_where_some_have_no_guess_a_try_of_many_takes_no_more_than_another_step() -> None:
    numbers = {}
    for guessing in (8, 7):
        widths = priced(0.001, 0.01)
        found = []
        for _ in range(4):
            widths.begin(5000)
            widths.took(8, 0, 0.081)
            found.append(sum(widths.choose([SURE] * guessing, 8, 8)))
        numbers[guessing] = max(found)
    # Each of them costs an eighth of a step.
    assert numbers[8] > 16 > numbers[7]


def test_rows_that_are_held_back_are_soon_asked_as_seldom_as_others() -> None:
    widths, asked = Widths(), 0
    for _ in range(2000):
        widths.begin()
        if widths.asks(3):
            asked += 1
            widths.held_back(3)
    assert 20 < asked <= 45
    widths.verified(3, SURE, 2)
    widths.held_back(3)
    assert widths.rests(3) <= 2


def test_the_widest_that_pays_is_chosen_where_all_pay_well() -> None:
    widths = priced(0.02, 0.001)
    for _ in range(60):
        widths.verified(0, SURE, 16)
    # A draft costs a twentieth of the step and brings an eighth of its tokens.
    assert widths.choose([SURE] * 8, 8, 8) == [16] * 8


def test_a_dear_price_is_doubted_after_a_while() -> None:
    costs = Costs()
    costs.took(8, 0, 0.01)
    for _ in range(10):
        costs.took(8, 4, 0.03)
    for steps, doubted in ((500, False), (100, True)):
        costs.begin(steps)
        costs.took(8, 1, 0.01 * 1.02)
        for as_seen in (False, True):
            price = costs.price(8, 4, as_seen=as_seen)
            assert (price == costs.price(8, 1)) == doubted, (steps, as_seen)
