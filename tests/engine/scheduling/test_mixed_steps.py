"""How much of a prompt a step takes in which other rows decode."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.core.config import Config
from src.core.errors import ConfigError
from src.core.plan import StepPlan
from src.core.request import Request
from src.engine.scheduling.scheduler import SchedulerLimits
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request


def turn(simulation: Simulation) -> StepPlan:
    plan = simulation.launch()
    assert plan is not None
    simulation.commit()
    return plan


def tokens(plan: StepPlan) -> dict[int, int]:
    return {step.row: step.num_tokens for step in plan.rows}


def with_rows_that_decode(count: int, **changes: int) -> Simulation:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 100}
    simulation = Simulation(make_limits(**(values | changes)))
    for key in range(count):
        simulation.add(make_request(key, 2, 30, ends=False))
    if count:
        turn(simulation)
    return simulation


def test_beside_decoding_rows_a_prompt_gets_less_than_the_budget() -> None:
    bounds = {"max_mixed_prefill_tokens": 6, "prefill_tokens_per_decode": 2}
    simulation = with_rows_that_decode(1, **bounds)
    simulation.add(make_request(1, 20, 2))
    assert [tokens(turn(simulation)) for _ in range(4)] == [{0: 1, 1: n} for n in (6, 6, 6, 2)]
    simulation.drain()


def test_newcomers_share_it() -> None:
    simulation = with_rows_that_decode(1, max_mixed_prefill_tokens=6, prefill_tokens_per_decode=2)
    for key in (1, 2, 3):
        simulation.add(make_request(key, 4, 30, ends=False))
    assert tokens(turn(simulation)) == {0: 1, 1: 4, 2: 2}
    # The third got nothing of the last step; now two rows decode.
    assert tokens(turn(simulation)) == {0: 1, 1: 1, 2: 2, 3: 4}
    simulation.drain()


def test_many_decoding_rows_leave_a_prompt_more() -> None:
    simulation = with_rows_that_decode(5, max_mixed_prefill_tokens=6, prefill_tokens_per_decode=2)
    simulation.add(make_request(5, 20, 2))
    assert tokens(turn(simulation))[5] == 10
    simulation.drain()


@pytest.mark.parametrize("others", [0, 1])
def test_what_is_much_of_such_a_step_is_waited_for(others: int) -> None:
    # Of 512 tokens 20 are little, of 64 they are not.
    simulation = with_rows_that_decode(
        others, max_num_batched_tokens=512, max_mixed_prefill_tokens=64
    )
    for key in (5, 6):
        simulation.add(make_request(key, [1, 2, 3, 4] * 5, 2))
    shared = tokens(turn(simulation))
    assert list(shared.values()) == ([1, 20] if others else [20, 20])
    simulation.drain()


def test_alone_prompts_get_the_whole_budget() -> None:
    simulation = Simulation(
        make_limits(max_num_batched_tokens=16, num_blocks=100, max_mixed_prefill_tokens=2)
    )
    for key in range(2):
        simulation.add(make_request(key, 20, 2))
    assert tokens(turn(simulation)) == {0: 16}
    simulation.drain()


def test_the_last_token_of_a_prompt_is_no_decoding_row() -> None:
    simulation = Simulation(
        make_limits(max_num_batched_tokens=16, num_blocks=100, max_mixed_prefill_tokens=2)
    )
    simulation.add(make_request(0, 17, 2))
    turn(simulation)
    simulation.add(make_request(1, 15, 2))
    assert tokens(turn(simulation)) == {0: 1, 1: 15}
    simulation.drain()


def test_the_budget_bounds_it() -> None:
    simulation = with_rows_that_decode(
        4, max_num_batched_tokens=8, max_mixed_prefill_tokens=100, prefill_tokens_per_decode=50
    )
    simulation.add(make_request(4, 20, 2))
    assert tokens(turn(simulation))[4] == 4
    simulation.drain()


@pytest.mark.parametrize(
    ("device_type", "given", "expected"),
    [("cpu", None, 256), ("cuda", None, None), ("cpu", 40, 40), ("cuda", 40, 40)],
)
def test_the_default_is_the_device_s(
    device_type: str, given: int | None, expected: int | None
) -> None:
    config = Config()
    section = msgspec.structs.replace(config.scheduler, max_mixed_prefill_tokens=given)
    limits = SchedulerLimits.of(
        msgspec.structs.replace(config, scheduler=section),
        device_type=device_type,
        block_size=16,
        windows=(None,),
        content_key="",
        num_blocks=64,
        max_model_len=512,
    )
    assert limits.max_mixed_prefill_tokens == expected
    assert limits.plan_late == (device_type == "cpu")


@pytest.mark.parametrize(
    ("name", "value"), [("max_mixed_prefill_tokens", 0), ("prefill_tokens_per_decode", -1)]
)
def test_a_bound_of_nothing_is_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least"):
        make_limits(**{name: value})


def pooled(key: int, prompt_len: int) -> Request:
    """A request for a vector, with a prompt of its own."""
    request = make_request(key, [1000 * (50 + key) + place for place in range(prompt_len)], 1)
    return msgspec.structs.replace(request, pooling="last", task="embed")


def test_beside_decoding_rows_vectors_get_little_of_what_prompts_get() -> None:
    simulation = with_rows_that_decode(1, max_mixed_prefill_tokens=30, max_mixed_pooled_tokens=4)
    simulation.add(pooled(1, 10))
    simulation.add(pooled(2, 3))
    simulation.add(make_request(3, 20, 5, ends=False))
    # The text came last, and waits for none of them.
    assert tokens(turn(simulation)) == {0: 1, 1: 3, 2: 1, 3: 20}
    assert tokens(turn(simulation)) == {0: 1, 1: 2, 2: 2, 3: 1}
    simulation.drain()


def test_without_decoding_rows_vectors_get_the_whole_budget() -> None:
    simulation = with_rows_that_decode(0, max_mixed_pooled_tokens=4)
    simulation.add(pooled(1, 40))
    simulation.add(pooled(2, 40))
    assert list(tokens(turn(simulation)).values()) == [40, 24]
    simulation.drain()


def test_a_flood_of_vectors_is_served_in_order_when_the_streams_have_ended() -> None:
    simulation = with_rows_that_decode(1, max_mixed_pooled_tokens=4)
    for key in range(1, 31):
        simulation.add(pooled(key, 10))
    simulation.add(make_request(31, 6, 8, ends=False))
    assert 6 in tokens(turn(simulation)).values()
    # Some end while no step has room for them.
    for key in (9, 20, 30):
        simulation.finish(key)
    assert simulation.finish(20) is None
    ended: list[int] = []
    while simulation.scheduler.has_work:
        simulation.launch()
        ended += [event.key for event in simulation.commit() if event.finish_reason]
    vectors = [key for key in ended if 1 <= key <= 30]
    assert vectors == sorted({*range(1, 31)} - {9, 20, 30})
    simulation.drain()


def test_of_each_tenant_some_vectors_are_looked_at() -> None:
    simulation = with_rows_that_decode(1, max_mixed_pooled_tokens=4, max_num_batched_tokens=64)
    for key in range(1, 21):
        simulation.add(msgspec.structs.replace(pooled(key, 4), tenant="flood"))
    turn(simulation)
    simulation.add(msgspec.structs.replace(pooled(21, 4), tenant="other"))
    for _ in range(4):
        turn(simulation)
    assert 21 not in simulation.scheduler._requests
    simulation.drain()


@pytest.mark.parametrize(("bound", "waits"), [(4, False), (None, True)])
def test_a_text_waits_for_no_prefix_of_which_few_tokens_come(
    bound: int | None, waits: bool
) -> None:
    simulation = with_rows_that_decode(
        1, max_mixed_pooled_tokens=bound, max_mixed_prefill_tokens=30, num_blocks=200
    )
    vector = pooled(1, 60)
    simulation.add(vector)
    turn(simulation)
    simulation.add(make_request(2, [*vector.prompt_token_ids, 5], 2))
    assert (2 in tokens(turn(simulation))) == (not waits)
    simulation.drain()


def of_tenant(request: Request, tenant: str) -> Request:
    return msgspec.structs.replace(request, tenant=tenant)


def steps_until_end(simulation: Simulation, key: int) -> int:
    """Steps until a request has ended; each takes what it may of pooled requests."""
    for count in range(1, 60):
        turn(simulation)
        if key not in simulation.scheduler._requests:
            return count
    raise AssertionError("it has not ended")


@pytest.mark.parametrize("tenants", [("", ""), ("a", "a"), ("a", "b")])
@pytest.mark.parametrize("runs", [False, True])
def test_a_short_text_does_not_wait_for_a_long_one(tenants: tuple[str, str], runs: bool) -> None:
    simulation = with_rows_that_decode(1, max_mixed_pooled_tokens=4, num_blocks=200)
    simulation.add(of_tenant(pooled(1, 60), tenants[0]))
    if runs:
        assert tokens(turn(simulation)) == {0: 1, 1: 4}
    simulation.add(of_tenant(pooled(2, 2), tenants[1]))
    assert tokens(turn(simulation)) == {0: 1, 1: 2, 2: 2}
    assert 2 not in simulation.scheduler._requests
    # Nothing is kept for nobody.
    assert tokens(turn(simulation)) == {0: 1, 1: 4}
    simulation.drain()


def test_tenants_share_what_vectors_may_have_of_a_step() -> None:
    simulation = with_rows_that_decode(1, max_mixed_pooled_tokens=9, num_blocks=300)
    for key, tenant in enumerate(("a", "a", "a", "b", "c"), start=1):
        simulation.add(of_tenant(pooled(key, 50), tenant))
    got = dict.fromkeys("abc", 0)
    for _ in range(4):
        turn(simulation)
    for state in simulation.scheduler._requests.values():
        if state.request.pooling:
            got[state.request.tenant] += state.launched
    assert got == {"a": 12, "b": 12, "c": 12}
    simulation.drain()


def test_a_text_that_comes_late_is_before_the_rest_of_all_long_ones() -> None:
    simulation = with_rows_that_decode(1, max_mixed_pooled_tokens=16, num_blocks=400)
    for key in (1, 2, 3):
        simulation.add(pooled(key, 60))
    turn(simulation)
    simulation.add(pooled(4, 2))
    assert steps_until_end(simulation, 4) <= 2
    simulation.drain()


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(
    num_lanes=st.integers(2, 6),
    bound=st.integers(1, 9),
    depth=st.integers(1, 2),
    lengths=st.lists(st.integers(12, 60), min_size=6, max_size=12),
    prompts=st.booleans(),
)
def test_every_tenant_s_vectors_get_on_within_as_many_steps_as_there_are_tenants(
    num_lanes: int,
    bound: int,
    depth: int,
    lengths: list[int],
    prompts: bool,
) -> None:
    simulation = with_rows_that_decode(
        1,
        max_mixed_pooled_tokens=bound,
        max_num_batched_tokens=100,
        max_num_seqs=40,
        num_blocks=2000,
    )
    simulation.depth = depth
    for key, length in enumerate(lengths, start=1):
        simulation.add(of_tenant(pooled(key, length), f"t{key % num_lanes}"))
    since = dict.fromkeys([f"t{number}" for number in range(num_lanes)], 0)
    for number in range(25):
        for lane in since if prompts else ():
            # A prompt to generate from is not a turn of its tenant's vectors.
            simulation.add(of_tenant(make_request(1000 + 10 * number + int(lane[1]), 2, 1), lane))
        assert simulation.launch() is not None
        assert 0 in simulation.scheduler._requests
        _, states = simulation.scheduler._in_flight[-1]
        served = {state.lane for state in states if state.request.pooling}
        if number >= depth - 1:
            simulation.commit()
        unfinished = simulation.scheduler._requests.values()
        # What is launched to its end asks for nothing more.
        asking = {s.lane for s in unfinished if s.request.pooling and s.launched < s.prompt_len}
        for lane in since:
            since[lane] = 0 if lane in served or lane not in asking else since[lane] + 1
            assert since[lane] < num_lanes, f"{lane} got nothing for {since[lane]} steps"
    simulation.drain()


def test_vectors_get_more_beside_many_rows_that_decode() -> None:
    simulation = with_rows_that_decode(
        24, max_mixed_pooled_tokens=4, max_num_seqs=40, num_blocks=900
    )
    simulation.add(pooled(30, 60))
    assert tokens(turn(simulation))[24] == 6
    simulation.drain()
