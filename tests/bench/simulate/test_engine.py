from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.bench.simulate.engine import SimulatedEngine
from src.bench.simulate.fleet import simulate
from src.bench.simulate.outcome import NEVER, Journal
from src.bench.simulate.requests import RandomWorkload, SimulatedRequest
from src.bench.simulate.step_cost import Price, StepCost
from src.core.errors import ConfigError
from src.engine.scheduling.scheduler import SchedulerLimits
from tests.bench.simulate.prices import LIMITS, cost_of

DEVICE = Price(step=0.010, decode_rows=0.001, prefill_tokens=0.0005)
# Seconds of a step that is full of prompts or of rows.
LONGEST = DEVICE.step + LIMITS.max_num_batched_tokens * DEVICE.decode_rows

requests = st.lists(
    st.builds(
        SimulatedRequest,
        at=st.floats(0, 2),
        pieces=st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=3
        ).map(tuple),
        output_len=st.integers(1, 30),
        max_tokens=st.integers(30, 60),
        priority=st.integers(0, 2),
    ),
    min_size=1,
    max_size=30,
).map(lambda made: sorted(made, key=lambda request: request.at))


def run(
    made: list[SimulatedRequest], depth: int, *, plan_late: bool = False, **host: object
) -> tuple[Journal, SimulatedEngine]:
    journal = Journal()
    limits = msgspec.structs.replace(LIMITS, plan_late=plan_late)
    engine = SimulatedEngine(limits, cost_of(DEVICE, **host), journal, depth=depth)
    for request in made:
        engine.advance(request.at)
        engine.submit(request)
    engine.advance(math.inf)
    return journal, engine


@given(requests, st.sampled_from((1, 2)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_everybody_is_answered_once_and_in_order_of_time(
    made: list[SimulatedRequest], depth: int, plan_late: bool
) -> None:
    host = {"commit": Price(step=0.001), "submit": 0.0002, "dispatch": 0.0003}
    journal, engine = run(made, depth, plan_late=plan_late, **host)
    assert journal.refused == 0
    for key, request in enumerate(made):
        # No prompt is computed faster than the device can, whatever the cache had of it.
        least = DEVICE.step
        assert journal.first[key] - request.at >= least - 1e-9
        tokens = request.output_len
        assert journal.last[key] - journal.first[key] >= (tokens - 1) * least - 1e-9
    # The device is never at two steps at once, but may be at one that nobody needs any more.
    assert engine.busy_seconds <= max(journal.last) + LONGEST + 1e-9
    engine.scheduler.check()
    engine.scheduler.check_idle()
    decoded = sum(request.output_len for request in made)
    assert engine.scheduler.stats.scheduled_tokens >= decoded - len(made)


@given(requests)
@settings(max_examples=15, deadline=None)
def test_the_same_requests_take_the_same_time(made: list[SimulatedRequest]) -> None:
    cost = cost_of(DEVICE, spread=[-0.03, 0.0, 0.03])
    one, other = (simulate(made, LIMITS, cost, seed=7) for _ in range(2))
    assert one == other


def test_a_lone_request_takes_what_its_steps_cost() -> None:
    request = SimulatedRequest(1.0, ((0, 20),), output_len=5, max_tokens=5)
    journal, engine = run([request], 1)
    # Twenty tokens of a prompt, then four steps with a row that decodes.
    prefill, decode = 0.010 + 20 * 0.0005, 0.010 + 0.001
    assert journal.first[0] == pytest.approx(1.0 + prefill)
    assert journal.last[0] == pytest.approx(1.0 + prefill + 4 * decode)
    assert engine.busy_seconds == pytest.approx(prefill + 4 * decode)
    assert journal.gaps[-1] == pytest.approx(decode)


def test_the_host_is_hidden_at_depth_two_and_not_at_one() -> None:
    request = SimulatedRequest(0.0, ((0, 4),), output_len=50, max_tokens=50)
    host = {"plan": Price(step=0.004), "commit": Price(step=0.004)}
    decode = 0.010 + 0.001
    for depth, period in ((1, decode + 0.008), (2, decode)):
        journal, _ = run([request], depth, **host)
        assert (journal.last[0] - journal.first[0]) / 49 == pytest.approx(period, rel=0.02)


def test_planned_late_a_step_takes_in_who_came_while_another_ran() -> None:
    """One row decodes, 11 ms a step, and others come 2 ms after one of its steps has begun."""
    long = SimulatedRequest(0.0, ((0, 1),), output_len=100, max_tokens=100)
    comers = [SimulatedRequest(0.002 + 0.111 * i, ((i, 2),), 1, 1) for i in range(1, 9)]
    ttfts = {}
    for plan_late in (False, True):
        journal, _ = run([long, *comers], 2, plan_late=plan_late)
        ttfts[plan_late] = [journal.first[key] - comers[key - 1].at for key in range(2, 9)]
        # The device has every step in time all the same.
        assert journal.last[0] == pytest.approx(0.011 * 100 + 8 * 0.001, abs=0.002)
    for early, late in zip(ttfts[False], ttfts[True], strict=True):
        assert early - late == pytest.approx(0.011, abs=0.002)


def test_an_output_that_ends_early_costs_no_more_than_a_step_in_flight() -> None:
    request = SimulatedRequest(0.0, ((0, 4),), output_len=5, max_tokens=50)
    for depth in (1, 2):
        journal, engine = run([request], depth)
        assert journal.last[0] > journal.first[0]
        assert engine.scheduler.stats.steps == 5 + depth - 1
        assert engine.scheduler.stats.discarded_tokens == depth - 1


def test_a_prefix_that_is_cached_is_not_computed() -> None:
    made = [SimulatedRequest(float(i), ((0, 60), (1 + i, 4)), 1, 1) for i in range(2)]
    outcome = simulate(made, LIMITS, cost_of(DEVICE))
    assert outcome.scheduler.prefix_cache_hits == 60
    assert outcome.ttft.mean == pytest.approx((0.010 + 64 * 0.0005 + 0.010 + 0.001) / 2, rel=0.1)


def test_what_the_queue_has_no_room_for_is_refused() -> None:
    tight = LIMITS.__class__(
        max_num_seqs=1, max_num_batched_tokens=64, block_size=4, num_blocks=96, max_model_len=256,
        max_waiting_requests=2,
    )  # fmt: skip
    made = [SimulatedRequest(0.0, ((i, 4),), 2, 2) for i in range(5)]
    outcome = simulate(made, tight, cost_of(DEVICE))
    assert (outcome.completed, outcome.refused) == (2, 3)


def test_two_engines_serve_twice_as_much() -> None:
    workload = RandomWorkload(count=200, input_len=(8, 16), output_len=(8, 16))
    one, two = (
        simulate(workload.requests(math.inf), LIMITS, cost_of(DEVICE), replicas=n, routing=routing)
        for n, routing in ((1, "round-robin"), (2, "least-requests"))
    )
    assert two.request_throughput == pytest.approx(2 * one.request_throughput, rel=0.1)


def test_requests_must_come_in_order() -> None:
    made = [SimulatedRequest(at, ((0, 4),), 1, 1) for at in (1.0, 0.5)]
    with pytest.raises(ConfigError, match="request 1 comes before"):
        simulate(made, LIMITS, cost_of(DEVICE))
    with pytest.raises(ConfigError, match="no request"):
        simulate([], LIMITS, cost_of(DEVICE))


def test_an_unanswered_request_is_never_counted() -> None:
    journal = Journal()
    journal.add(0.0, 4, 4)
    assert journal.first[0] == journal.last[0] == NEVER


def test_a_workload_is_what_it_says() -> None:
    workload = RandomWorkload(
        count=300, input_len=(3, 9), output_len=(2, 5), prefix_len=7, num_prefixes=2, max_tokens=6,
        priorities=3, seed=4,
    )  # fmt: skip
    made = list(workload.requests(10.0))
    assert made == list(workload.requests(10.0))
    assert made[-1].at == pytest.approx(30.0)
    assert all(one.at <= other.at for one, other in itertools.pairwise(made))
    assert {request.priority for request in made} == {0, 1, 2}
    assert {request.max_tokens for request in made} == {6}
    assert {request.prompt_len for request in made} == set(range(10, 17))
    assert {request.output_len for request in made} == {2, 3, 4, 5}
    engines = [request.to_engine(key).prompt_token_ids for key, request in enumerate(made)]
    assert len({tuple(tokens[:7]) for tokens in engines}) == 2
    assert len({tuple(tokens[7:8]) for tokens in engines}) == 300


def drafting(drafted: float, accepted: float, most: int = 4) -> tuple[SchedulerLimits, StepCost]:
    """An engine whose rows draft so many tokens a step on average, and have so many right."""
    price = msgspec.structs.replace(DEVICE, drafted_tokens=0.0001)
    limits = msgspec.structs.replace(LIMITS, max_drafts=most)
    return limits, cost_of(price, drafted=drafted, accepted=accepted)


@given(requests, st.sampled_from((1, 2)), st.sampled_from(((0.4, 0.3), (3.5, 2.5), (9.0, 9.0))))
@settings(max_examples=60, deadline=None)
def test_with_drafts_everybody_has_the_same_output_sooner(
    made: list[SimulatedRequest], depth: int, drafts: tuple[float, float]
) -> None:
    limits, cost = drafting(*drafts)
    journal = Journal()
    engine = SimulatedEngine(limits, cost, journal, depth=depth)
    for request in made:
        engine.advance(request.at)
        engine.submit(request)
    engine.advance(math.inf)
    assert journal.refused == 0
    for key, request in enumerate(made):
        # No step brings a row more than one token and its drafts.
        steps = math.ceil((request.output_len - 1) / 5)
        assert journal.last[key] - journal.first[key] >= steps * DEVICE.step - 1e-9
    engine.scheduler.check()
    engine.scheduler.check_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_lone_output_takes_as_many_steps_as_its_drafts_leave(depth: int) -> None:
    request = SimulatedRequest(at=0, pieces=((0, 20),), output_len=101, max_tokens=101)
    taken = {}
    for drafted, accepted, most in ((0.0, 0.0, 0), (2.0, 1.0, 4), (4.0, 4.0, 4), (8.0, 8.0, 4)):
        limits, cost = drafting(drafted, accepted, most)
        journal = Journal()
        engine = SimulatedEngine(limits, cost, journal, depth=depth)
        engine.submit(request)
        engine.advance(math.inf)
        taken[accepted] = journal.last[0] - journal.first[0]
    alone = DEVICE.step + DEVICE.decode_rows
    assert taken[0.0] == pytest.approx(100 * alone)
    # The first step behind a prompt may have been planned without.
    assert taken[1.0] == pytest.approx(50 * (alone + 2 * 0.0001), rel=0.05)
    assert taken[4.0] == pytest.approx(20 * (alone + 4 * 0.0001), rel=0.12)
    # A row has at most four.
    assert taken[8.0] == pytest.approx(taken[4.0], rel=0.01)


def test_an_output_may_end_within_drafts() -> None:
    limits, cost = drafting(4.0, 4.0)
    for output_len in range(1, 20):
        made = SimulatedRequest(at=0, pieces=((0, 9),), output_len=output_len, max_tokens=60)
        journal = Journal()
        engine = SimulatedEngine(limits, cost, journal, depth=2)
        engine.submit(made)
        engine.advance(math.inf)
        assert journal.last[0] < math.inf
        engine.scheduler.check_idle()
        # Steps behind the end are few: those in flight.
        assert engine.scheduler.stats.scheduled_tokens < 9 + 5 * (output_len + 3)
