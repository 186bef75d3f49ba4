"""Several tenants: who gets which part of the steps, whatever the others send."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.core.adapter import Adapter
from src.core.errors import InvalidRequestError, QueueFullError
from src.core.plan import StepPlan
from src.core.request import Request
from src.engine.scheduling.admission import URGENT, SchedulerLimits
from src.engine.scheduling.request_state import Phase
from src.engine.scheduling.waiting import WaitingQueue
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request
from tests.engine.scheduling.test_properties import (
    EXAMPLES,
    INTERRUPTIONS,
    REQUESTS,
    STEPS,
    limits_of,
    outcome,
    requests_of,
    run,
    thorough,
)

TENANTS = ["a", "b", "c"]


def whose(simulation: Simulation, plan: StepPlan) -> Counter[str]:
    """Tokens of a plan by tenant."""
    counted: Counter[str] = Counter()
    tenants = {
        state.row: simulation.worker.requests[state.key].tenant
        for state in simulation.scheduler.states
        if state.row >= 0
    }
    for step in plan.rows:
        counted[tenants[step.row]] += step.num_tokens
    return counted


def flood(simulation: Simulation, tenant: str, first_key: int, count: int, *shape: int) -> None:
    for key in range(first_key, first_key + count):
        prompt, max_tokens = shape
        simulation.add(make_request(key, prompt, max_tokens, ends=False, tenant=tenant))


def steps_to_first_token(simulation: Simulation, key: int, most: int = 500) -> int:
    for count in range(1, most):
        simulation.step()
        if simulation.outputs[key]:
            return count
    raise AssertionError("no token came")


def end(simulation: Simulation) -> None:
    """Abort all: what they would have answered is for other tests to look at."""
    for key in list(simulation.outputs):
        simulation.finish(key)
    simulation.drain()


BIG = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 36,
    "block_size": 4,
    "num_blocks": 300,
    "max_model_len": 400,
}


def test_prompts_of_a_step_are_shared_by_weight() -> None:
    simulation = Simulation(make_limits(**BIG, weights={"c": 2}))
    for index, tenant in enumerate(TENANTS):
        flood(simulation, tenant, 10 * index, 2, 300, 1)
    for _ in range(5):
        plan = simulation.launch()
        assert plan is not None
        assert whose(simulation, plan) == {"a": 9, "b": 9, "c": 18}
        simulation.commit()
    end(simulation)


def test_what_one_does_not_use_is_the_others() -> None:
    simulation = Simulation(make_limits(**BIG))
    flood(simulation, "a", 0, 2, 300, 1)
    flood(simulation, "b", 10, 1, 4, 1)
    plan = simulation.launch()
    assert plan is not None
    assert whose(simulation, plan) == {"a": 32, "b": 4}
    end(simulation)


def predicting(request: Request, num_tokens: int) -> Request:
    """The request with a prediction of so many tokens, which is nobody else's."""
    return msgspec.structs.replace(request, prediction=bytes(bytearray(4 * num_tokens)))


def test_a_prediction_asks_for_no_part_of_a_step() -> None:
    """Nothing of it is computed, so its tokens leave the others what they use of the step."""
    simulation = Simulation(make_limits(**BIG))
    flood(simulation, "b", 10, 3, 9, 1)
    simulation.add(predicting(make_request(0, 4, 1, ends=False, tenant="a"), 300))
    plan = simulation.launch()
    assert plan is not None
    assert whose(simulation, plan) == {"a": 4, "b": 27}
    lanes = simulation.scheduler._waiting.lanes.values()
    assert [lane.num_predicted_tokens for lane in lanes] == [0, 0]
    simulation.commit()
    end(simulation)


def test_steps_of_one_token_go_round_by_weight() -> None:
    limits = make_limits(
        **BIG | {"max_mixed_prefill_tokens": 1, "prefill_tokens_per_decode": 0}, weights={"b": 2}
    )
    simulation = Simulation(limits)
    flood(simulation, "c", 20, 1, 2, 60)
    simulation.step()
    flood(simulation, "a", 0, 1, 40, 1)
    flood(simulation, "b", 10, 1, 40, 1)
    counted: Counter[str] = Counter()
    for _ in range(30):
        plan = simulation.launch()
        assert plan is not None
        counted += whose(simulation, plan)
        simulation.commit()
    assert counted == {"a": 10, "b": 20, "c": 30}
    end(simulation)


def test_a_row_is_made_free_for_whoever_has_less_than_its_share() -> None:
    simulation = Simulation(make_limits(**BIG))
    flood(simulation, "a", 0, 8, 4, 110)
    flood(simulation, "b", 30, 8, 4, 110)
    for _ in range(20):
        simulation.step()
    assert simulation.scheduler.num_running == 6
    before = simulation.scheduler.stats.yields
    flood(simulation, "c", 60, 5, 4, 110)
    assert steps_to_first_token(simulation, 60) <= 3
    for _ in range(20):
        simulation.step()
    running = [s for s in simulation.scheduler.states if s.phase is Phase.RUNNING]
    assert Counter(state.lane for state in running) == {"a": 2, "b": 2, "c": 2}
    # And it stays so: nobody goes in circles.
    yields = simulation.scheduler.stats.yields
    assert yields - before == 2
    for _ in range(50):
        simulation.step()
    assert simulation.scheduler.stats.yields == yields
    end(simulation)


def test_a_full_budget_makes_no_difference() -> None:
    """As many rows as tokens in a step: a row is given up before the step is planned."""
    simulation = Simulation(make_limits(**BIG | {"max_num_seqs": 8, "max_num_batched_tokens": 4}))
    flood(simulation, "a", 0, 8, 4, 110)
    for _ in range(20):
        simulation.step()
    flood(simulation, "b", 60, 1, 4, 2)
    assert steps_to_first_token(simulation, 60) <= 6
    end(simulation)


def test_memory_is_made_free_for_whoever_has_less_than_its_share() -> None:
    limits = make_limits(**BIG | {"num_blocks": 60})
    simulation = Simulation(limits)
    flood(simulation, "a", 0, 4, 20, 80)
    for _ in range(35):
        simulation.step()
    assert simulation.scheduler.kv_usage > 0.9
    flood(simulation, "b", 60, 1, 80, 2)
    assert steps_to_first_token(simulation, 60) <= 8
    assert simulation.scheduler.stats.yields >= 1
    end(simulation)


def test_room_that_is_being_made_is_for_whom_it_is_made() -> None:
    """It comes bit by bit, and the others have small requests waiting that would fit at once."""
    limits = make_limits(**BIG | {"num_blocks": 60, "max_num_seqs": 16, "lookahead_tokens": 0})
    simulation = Simulation(limits, 2)
    flood(simulation, "a", 0, 4, 36, 60)
    for _ in range(20):
        simulation.step()
    flood(simulation, "a", 20, 30, 4, 60)
    flood(simulation, "b", 60, 1, 100, 2)
    assert steps_to_first_token(simulation, 60) <= 9
    end(simulation)


def test_who_asks_for_more_than_its_share_of_memory_takes_it_from_nobody() -> None:
    limits = make_limits(**BIG | {"num_blocks": 60, "lookahead_tokens": 0})
    simulation = Simulation(limits)
    flood(simulation, "a", 0, 5, 20, 80)
    for _ in range(25):
        simulation.step()
    assert simulation.scheduler.kv_usage > 0.9
    # 31 blocks, and half of the memory is 30. Preempting would make room for them.
    flood(simulation, "b", 60, 1, 122, 2)
    for _ in range(10):
        simulation.step()
    assert simulation.scheduler.stats.yields == 0
    end(simulation)


def test_a_growing_row_takes_memory_from_who_has_most() -> None:
    limits = make_limits(**BIG | {"num_blocks": 60, "lookahead_tokens": 0})
    simulation = Simulation(limits)
    flood(simulation, "a", 0, 1, 32, 60)
    flood(simulation, "b", 60, 1, 4, 100)
    flood(simulation, "a", 1, 3, 32, 60)
    simulation.step()
    simulation.step()
    needy = simulation.scheduler.state(60)
    assert needy is not None
    victim = simulation.scheduler._allocator.victim(needy)
    assert victim is not None
    assert victim.lane == "a"
    preempted: list[int] = []
    while simulation.scheduler.stats.preemptions == 0:
        simulation.step()
        preempted += simulation.scheduler.take_preempted()
    for _ in range(5):
        simulation.step()
        preempted += simulation.scheduler.take_preempted()
    assert preempted
    assert 60 not in preempted
    end(simulation)


def test_a_prefix_that_another_tenant_computes_is_not_waited_for() -> None:
    simulation = Simulation(make_limits(**BIG, share_prefixes=True))
    prompt = list(range(1, 200))
    simulation.add(make_request(0, prompt, 1, tenant="a"))
    simulation.step()
    simulation.add(make_request(1, prompt, 1, tenant="b"))
    simulation.add(make_request(2, prompt, 1, tenant="a"))
    plan = simulation.launch()
    assert plan is not None
    assert [install.request_key for install in plan.installs] == [1]
    simulation.drain()


def test_priority_is_for_its_own_tenant() -> None:
    simulation = Simulation(make_limits(**BIG, policy="priority"))
    for key in range(20):
        simulation.add(make_request(key, 4, 60, ends=False, tenant="a", priority=-(2**31)))
    for _ in range(10):
        simulation.step()
    simulation.add(make_request(60, 4, 3, ends=False, tenant="b"))
    assert steps_to_first_token(simulation, 60) <= 3
    # Within a tenant it decides.
    simulation.add(make_request(70, 4, 3, ends=False, tenant="b", priority=5))
    simulation.add(make_request(71, 4, 3, ends=False, tenant="b", priority=1))
    lane = simulation.scheduler._waiting.lanes["b"]
    head = lane.peek(0)
    assert head is not None
    assert head.key == 71
    end(simulation)


@pytest.mark.parametrize("priority", [0, -(2**31)])
def test_priority_takes_no_memory_of_another_tenant_for_ever(priority: int) -> None:
    small = BIG | {"num_blocks": 30, "max_model_len": 120, "lookahead_tokens": 0}
    simulation = Simulation(make_limits(**small, policy="priority"))

    def keep_two(first_key: int) -> None:
        states = simulation.scheduler.states
        for key in range(first_key, first_key + 2 - sum(s.lane == "a" for s in states)):
            simulation.add(make_request(key, 4, 100, ends=False, tenant="a", priority=priority))

    keep_two(0)
    simulation.step()
    simulation.add(make_request(5000, 4, 80, ends=False, tenant="b"))
    for step in range(1, 300):
        keep_two(10 * step)
        simulation.step()
        if 5000 in simulation.finished:
            break
    assert 5000 in simulation.finished
    end(simulation)


def test_a_tenant_may_be_allowed_to_go_before_all_others() -> None:
    limits = make_limits(**BIG, policy="priority", priority_tenants=("b",))
    simulation = Simulation(limits)
    flood(simulation, "a", 0, 4, 300, 1)
    simulation.step()
    simulation.add(make_request(60, 72, 1, ends=False, tenant="b", priority=-1))
    simulation.add(make_request(61, 72, 1, ends=False, tenant="c", priority=-1))
    states = {state.key: state.lane for state in simulation.scheduler.states}
    assert states[60] == URGENT
    assert states[61] == "c"
    assert steps_to_first_token(simulation, 60) == 2
    end(simulation)


def test_a_large_request_is_not_passed_for_ever() -> None:
    """More memory than its tenant's share: it gets it once it has been passed often enough."""
    limits = make_limits(**BIG | {"num_blocks": 60, "max_bypasses": 4})
    simulation = Simulation(limits)
    flood(simulation, "a", 0, 3, 8, 12)
    simulation.step()
    simulation.add(make_request(500, 220, 2, ends=False, tenant="b"))
    key = 10
    for _ in range(300):
        # There are always some waiting, of two tenants.
        while simulation.scheduler.num_waiting < 6:
            tenant = "ac"[key % 2]
            simulation.add(make_request(key, 8, 12, ends=False, tenant=tenant))
            key += 1
        simulation.step()
        if simulation.outputs[500]:
            break
    assert simulation.outputs[500], "starved"
    end(simulation)


def test_the_patience_of_a_request_that_is_given_up_is_nobody_elses() -> None:
    """What passed it does not count for the next one of its tenant, which has only come."""
    limits = make_limits(**BIG | {"num_blocks": 60, "max_bypasses": 4})
    simulation = Simulation(limits)
    stats = simulation.scheduler.stats
    flood(simulation, "a", 0, 3, 8, 12)
    simulation.step()
    for key in (500, 501):
        simulation.add(make_request(key, 220, 2, ends=False, tenant="b"))
    key = 10

    def step() -> None:
        nonlocal key
        while simulation.scheduler.num_waiting < 6:
            simulation.add(make_request(key, 8, 12, ends=False, tenant="ac"[key % 2]))
            key += 1
        simulation.step()

    before = stats.admissions
    while stats.admissions - before <= 2 * 4:
        step()
    assert not simulation.outputs[500]
    simulation.finish(500)
    before = stats.admissions
    while not simulation.outputs[501]:
        step()
    # Itself, and others while it is passed.
    assert stats.admissions - before > 2 * 4
    end(simulation)


@pytest.mark.parametrize("priority", [0, -(2**31)])
def test_adapters_of_another_tenant_do_not_keep_the_slots(priority: int) -> None:
    many = BIG | {"max_num_seqs": 16, "num_adapter_slots": 1, "max_bypasses": 4}
    simulation = Simulation(make_limits(**many, policy="priority"))

    def add(key: int, tenant: str, adapter: int, max_tokens: int, priority: int = 0) -> None:
        request = make_request(key, 4, max_tokens, ends=False, tenant=tenant, priority=priority)
        chosen = Adapter(adapter, f"adapter {adapter}", bytes([adapter]))
        simulation.worker.requests[key] = msgspec.structs.replace(request, adapter=chosen)
        simulation.scheduler.add(simulation.worker.requests[key])
        simulation.outputs[key] = []

    for key in range(60):
        add(key, "a", key % 3, 5 + 7 * key % 23, priority)
    for _ in range(5):
        launch_and_commit(simulation)
    add(60, "b", 9, 4)
    admitted = simulation.scheduler.stats.admissions
    while not simulation.outputs[60]:
        launch_and_commit(simulation)
    # Those that the slot's owner may still admit, and nobody behind them.
    assert simulation.scheduler.stats.admissions - admitted <= 2 * 4
    end(simulation)


def launch_and_commit(simulation: Simulation) -> None:
    """A step, where requests that wait for slots go aside and others past them."""
    plan = simulation.scheduler.schedule()
    assert plan is not None
    simulation.worker.launch(plan)
    simulation.commit()


def test_lanes_come_and_go() -> None:
    simulation = Simulation(make_limits(**BIG))
    scheduler = simulation.scheduler
    assert scheduler._waiting.lanes == {}
    flood(simulation, "a", 0, 1, 8, 2)
    flood(simulation, "b", 1, 1, 8, 9)
    assert set(scheduler._waiting.lanes) == {"a", "b"}
    while 0 not in simulation.finished:
        simulation.step()
    assert set(scheduler._waiting.lanes) == {"b"}
    simulation.finish(1)
    assert scheduler._waiting.lanes == {}
    simulation.drain()


def test_one_tenant_leaves_room_in_the_queue() -> None:
    simulation = Simulation(make_limits(**BIG, max_waiting_requests=8, max_waiting_tokens=100))
    flood(simulation, "a", 0, 4, 4, 2)
    with pytest.raises(QueueFullError, match="4 requests with 16 tokens of this key"):
        flood(simulation, "a", 4, 1, 4, 2)
    flood(simulation, "b", 10, 2, 4, 2)
    with pytest.raises(QueueFullError, match="of this key"):
        flood(simulation, "b", 12, 1, 4, 2)
    flood(simulation, "c", 20, 1, 4, 2)
    flood(simulation, "d", 30, 1, 4, 2)
    with pytest.raises(QueueFullError, match="8 requests are waiting, at most 8 may"):
        flood(simulation, "e", 40, 1, 4, 2)
    simulation.drain()


def test_one_tenant_leaves_tokens_in_the_queue() -> None:
    queue = WaitingQueue(100, 100)
    queue.check_room(1000, lane="a")  # one request in any case
    with pytest.raises(InvalidRequestError, match="at most 50 may wait for one key") as refused:
        queue.check_room(51, 2, lane="a")
    assert refused.value.param == "n"
    queue.check_room(50, 2, lane="a")
    queue.check_room(100, 2)
    with pytest.raises(InvalidRequestError, match="at most 50 requests may wait for one key"):
        queue.check_room(51, 51, lane="a")


def test_predictions_of_one_tenant_leave_room_in_the_queue() -> None:
    simulation = Simulation(make_limits(**BIG, max_waiting_tokens=100))

    def ask(key: int, tenant: str, prompt: int, predicted: int) -> None:
        simulation.add(predicting(make_request(key, prompt, 2, tenant=tenant), predicted))

    ask(0, "a", 4, 26)
    with pytest.raises(QueueFullError, match="1 requests with 30 tokens of this key"):
        ask(1, "a", 4, 17)
    ask(1, "a", 4, 16)
    ask(2, "b", 4, 40)
    with pytest.raises(QueueFullError, match="of this key"):
        ask(3, "a", 1, 1)
    simulation.finish(0)
    ask(3, "a", 1, 1)
    end(simulation)


def test_a_prefix_of_another_tenant_is_no_hit() -> None:
    for share_prefixes in (False, True):
        simulation = Simulation(make_limits(**BIG, share_prefixes=share_prefixes))
        prompt = list(range(1, 20))
        for key, tenant in enumerate(["a", "a", "b"]):
            simulation.add(make_request(key, prompt, 1, tenant=tenant))
            simulation.drain()
        cached = [simulation.first_events[key].cached_tokens for key in range(3)]
        assert cached == ([0, 16, 16] if share_prefixes else [0, 16, 0])


def test_salt_and_tenant_cannot_be_taken_for_each_other() -> None:
    simulation = Simulation(make_limits(**BIG))
    prompt = list(range(1, 20))
    names = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("c", "ab")]
    for key, (salt, tenant) in enumerate(names):
        simulation.add(make_request(key, prompt, 1, cache_salt=salt, tenant=tenant))
        simulation.drain()
        assert simulation.first_events[key].cached_tokens == 0
    simulation.add(make_request(9, prompt, 1, cache_salt="a", tenant="bc"))
    simulation.drain()
    assert simulation.first_events[9].cached_tokens == 16


# Anything at any moment. The floods are long, so fewer of them are looked at.

fewer = settings(thorough, max_examples=int(EXAMPLES or 30))

SHARED_LIMITS = st.builds(
    msgspec.structs.replace,
    limits_of(),
    weights=st.sampled_from([{}, {"a": 3}, {"b": 2, "c": 5}]),
    priority_tenants=st.sampled_from([(), ("a",), ("b", "c")]),
    share_prefixes=st.booleans(),
)
OF_TENANTS = st.builds(
    msgspec.structs.replace,
    requests_of(),
    tenant=st.sampled_from(TENANTS),
    priority=st.integers(-1, 2),
)
OPERATIONS = st.tuples(
    st.lists(OF_TENANTS, min_size=2, max_size=8),
    st.lists(
        st.one_of(STEPS, STEPS, STEPS, STEPS, OF_TENANTS, INTERRUPTIONS), min_size=10, max_size=60
    ),
).map(lambda parts: [*parts[0], *parts[1]])


@given(limits=SHARED_LIMITS, depth=st.integers(1, 3), operations=OPERATIONS)
@thorough
def test_anything_may_happen_among_tenants(
    limits: SchedulerLimits, depth: int, operations: list[object]
) -> None:
    run(Simulation(limits, depth), operations)


@given(limits=limits_of(), depth=st.integers(1, 2), requests=REQUESTS, tenant=st.just("a"))
@fewer
def test_one_tenant_is_served_as_nobody_is(
    limits: SchedulerLimits, depth: int, requests: list[tuple[Request, int]], tenant: str
) -> None:
    # What a tenant may wait with is less, so the queue has room for all here.
    limits = msgspec.structs.replace(limits, max_waiting_requests=999, max_waiting_tokens=99999)
    named = [(msgspec.structs.replace(each, tenant=tenant), steps) for each, steps in requests]
    plain, one = outcome(limits, depth, requests)[2], outcome(limits, depth, named)[2]
    assert plain.plans == one.plans
    assert plain.scheduler.stats == one.scheduler.stats


@st.composite
def floods(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Requests of two tenants that flood: whose, tokens of the prompt and of the output."""
    one = st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 60), st.integers(1, 60))
    return draw(st.lists(one, min_size=12, max_size=40))


@given(
    flooding=floods(),
    weight=st.integers(1, 3),
    rows=st.integers(3, 8),
    budget=st.integers(12, 40),
    prompt=st.integers(1, 40),
    warm_up=st.integers(0, 40),
    depth=st.integers(1, 2),
    mixed=st.sampled_from([None, 12, 20]),
)
@fewer
def test_a_flood_costs_no_more_than_the_share(
    flooding: list[tuple[str, int, int]],
    weight: int,
    rows: int,
    budget: int,
    prompt: int,
    warm_up: int,
    depth: int,
    mixed: int | None,
) -> None:
    """First token within the steps that the prompt takes at its share of the least budget.

    And a few more: the steps in flight, and those until a row that was given up is free.
    """
    limits = make_limits(
        max_num_seqs=rows,
        max_num_batched_tokens=budget + rows,
        max_mixed_prefill_tokens=mixed,
        prefill_tokens_per_decode=0,
        block_size=4,
        num_blocks=rows * 30,
        max_model_len=120,
        weights={"quiet": weight},
        max_waiting_requests=999,
        max_waiting_tokens=99999,
    )
    simulation = Simulation(limits, depth)
    for key, (tenant, length, max_tokens) in enumerate(flooding):
        simulation.add(make_request(key, length, max_tokens, ends=False, tenant=tenant))
    for _ in range(warm_up):
        simulation.step()
    simulation.add(make_request(500, prompt, 3, ends=False, tenant="quiet"))
    share = min(budget, mixed or budget) * weight // (weight + 2)
    most = -(-prompt // share) + 2 * depth + 2
    assert steps_to_first_token(simulation, 500) <= most
    end(simulation)


def shares_of(simulation: Simulation, steps: int) -> Counter[str]:
    counted: Counter[str] = Counter()
    for _ in range(steps):
        plan = simulation.launch()
        if plan is not None:
            counted += whose(simulation, plan)
        simulation.commit()
    return counted


@given(
    weights=st.fixed_dictionaries({name: st.integers(1, 5) for name in TENANTS}),
    budget=st.integers(1, 40),
)
@fewer
def test_prompts_are_computed_in_proportion(weights: dict[str, int], budget: int) -> None:
    """While all have prompts to compute, within one turn of each."""
    limits = make_limits(
        max_num_seqs=3,
        max_num_batched_tokens=max(3, budget),
        block_size=4,
        num_blocks=3000,
        max_model_len=3000,
        weights=weights,
    )
    simulation = Simulation(limits)
    for key, tenant in enumerate(TENANTS):
        simulation.add(make_request(key, 2500, 1, ends=False, tenant=tenant))
    steps = 40
    counted = shares_of(simulation, steps)
    total = sum(counted.values())
    assert total == steps * max(3, budget)
    for name, weight in weights.items():
        fair = total * weight / sum(weights.values())
        # A turn, and what is rounded down in a step.
        assert abs(counted[name] - fair) <= weight + sum(weights.values()) + steps
    end(simulation)
