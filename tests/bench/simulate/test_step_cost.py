from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.bench.simulate.step_cost import MIN_STEPS, FitError, Price, Work, fit
from src.core.steps import StepRecord
from tests.bench.simulate.prices import record

amounts = st.floats(1e-6, 1e-3)


def works(count: int, seed: int) -> list[Work]:
    source = random.Random(seed)
    made = []
    for _ in range(count):
        prefill_rows = source.choice((0, 0, 1, 3))
        tokens = sum(source.randint(2, 200) for _ in range(prefill_rows))
        decode_rows = source.randint(0 if prefill_rows else 1, 32)
        context = tokens + decode_rows * source.randint(1, 500)
        pairs = tokens * source.randint(1, 100) if prefill_rows else 0
        rows = decode_rows + prefill_rows
        made.append(Work(decode_rows, prefill_rows, tokens, context, pairs, rows))
    return made


def steps_of(price: Price, count: int, seed: int) -> list[StepRecord]:
    begin, steps = 1.0, []
    for number, work in enumerate(works(count, seed), start=1):
        seconds = price.seconds(work)
        steps.append(record(number, work, begin, seconds))
        begin += seconds + 0.01
    return steps


@given(amounts, amounts, amounts, amounts, amounts, amounts, st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_a_price_is_found_again(
    step: float, row: float, prefill: float, token: float, context: float, pair: float, seed: int
) -> None:
    price = Price(step, row, prefill, token, context / 100, pair / 1000)
    cost = fit(steps_of(price, 120, seed), submit=0.25)
    for work in works(50, seed + 1):
        assert cost.device.seconds(work) == pytest.approx(price.seconds(work), rel=1e-3)
    assert cost.error < 1e-3
    assert cost.submit == 0.25
    assert cost.num_steps == 120


def test_drafts_have_a_price_and_are_counted_by_decoding_rows() -> None:
    price = Price(step=0.01, decode_rows=0.001, drafted_tokens=0.0004)
    source, begin, steps = random.Random(5), 1.0, []
    rows = drafted = accepted = 0
    for number in range(1, 101):
        count = source.randint(1, 8)
        drafts = source.choice((0, count, 3 * count))
        work = Work(count, 0, 0, 40 * count, 0, count, drafted_tokens=drafts)
        seconds = price.seconds(work)
        steps.append(record(number, work, begin, seconds, accepted=drafts // 2))
        begin += seconds + 0.01
        rows, drafted, accepted = rows + count, drafted + drafts, accepted + drafts // 2
    cost = fit(steps)
    assert cost.device.drafted_tokens == pytest.approx(0.0004, rel=1e-3)
    assert cost.device.prefill_tokens == 0
    assert cost.drafted == pytest.approx(drafted / rows)
    assert cost.accepted == pytest.approx(accepted / rows)


def test_the_host_is_priced_apart() -> None:
    cost = fit(steps_of(Price(step=0.01), 60, seed=1))
    work = works(1, 2)[0]
    assert cost.plan.seconds(work) == pytest.approx(0.002)
    assert cost.commit.seconds(work) == pytest.approx(0.001)
    assert cost.publish.seconds(work) == pytest.approx(0.001)
    # From the end of a step, or from when it was launched.
    assert cost.dispatch == pytest.approx(0.001)
    assert cost.handover.seconds(work) == pytest.approx(0.0, abs=1e-9)


def test_the_spread_is_that_of_the_device() -> None:
    source = random.Random(0)
    begin, steps = 1.0, []
    for number, work in enumerate(works(400, 3), start=1):
        steps.append(record(number, work, begin, source.choice((0.005, 0.015))))
        begin += 0.1
    spread = fit(steps).spread
    assert sum(spread) / len(spread) == pytest.approx(0.0, abs=1e-12)
    assert spread == sorted(spread)
    # 5 ms off a price of about 10 ms, over its root.
    assert spread[0] == pytest.approx(-0.05, abs=0.01)
    assert spread[-1] == pytest.approx(0.05, abs=0.01)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(FitError, match=f"a fit needs {MIN_STEPS}"):
        fit(steps_of(Price(step=0.01), MIN_STEPS - 1, seed=0))


def test_steps_without_a_context_are_refused() -> None:
    steps = [record(i, Work(1, 0, 0, 0, 0, 1), float(i), 0.1) for i in range(1, 60)]
    with pytest.raises(FitError, match="record them anew"):
        fit(steps)
