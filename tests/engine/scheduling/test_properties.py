"""Random arrivals, lengths, prefixes, stops and interruptions through tiny pools.

The checks live in ``simulation.py`` (the books, after every call) and ``fake_worker.py`` (what the
device would have computed, before every step).
"""

from __future__ import annotations

import os

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from src.core.blocks import Chunk
from src.core.errors import QueueFullError, RequestError
from src.core.outputs import FinishReason
from src.core.request import Request
from src.engine.scheduling.scheduler import SchedulerLimits
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request

# SLIPSTREAM_TEST_EXAMPLES=20000 looks longer, and with fresh randomness.
EXAMPLES = os.environ.get("SLIPSTREAM_TEST_EXAMPLES")
thorough = settings(
    max_examples=int(EXAMPLES or 150),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

# Prompts are cuts of a few common texts, so that prefixes are shared, often off block borders.
TEXTS = ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 1, 1, 2, 2, 3, 3, 4, 4], [6] * 12)


# Groups of layers: mostly one that sees everything, and with windows whatever there may be.
WINDOWS = st.one_of(
    st.just((None,)),
    st.lists(
        st.one_of(st.none(), st.integers(1, 9), st.integers(1, 9).map(Chunk)),
        min_size=1,
        max_size=4,
    ).map(tuple),
)


@st.composite
def limits_of(draw: st.DrawFn, /, **changes: object) -> SchedulerLimits:
    values: dict[str, object] = {
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 3, 4, 4])),
        "max_num_batched_tokens": draw(st.integers(1, 8)),
        "max_mixed_prefill_tokens": draw(st.sampled_from([None, None, 1, 2, 4])),
        "prefill_tokens_per_decode": draw(st.integers(0, 2)),
        "block_size": draw(st.integers(1, 4)),
        "num_blocks": draw(st.one_of(st.integers(2, 6), st.integers(2, 12), st.integers(6, 36))),
        "windows": draw(WINDOWS),
        "num_snapshots": draw(st.sampled_from([None, None, 0, 1, 2, 3, 5, 40])),
        "snapshot_interval": draw(st.sampled_from([1, 2, 3, 100])),
        "max_model_len": draw(st.integers(12, 48)),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "max_waiting_requests": draw(st.integers(1, 12)),
        "max_waiting_tokens": draw(st.integers(8, 80)),
        "max_bypasses": draw(st.integers(0, 3)),
        "lookahead_tokens": draw(st.sampled_from([0, 0, 1, 3])),
        "enable_prefix_caching": draw(st.booleans()),
        "max_drafts": draw(st.sampled_from([0, 0, 1, 2, 5])),
    }
    return make_limits(**(values | changes))


@st.composite
def requests_of(draw: st.DrawFn) -> Request:
    text = draw(st.sampled_from(TEXTS))
    max_tokens = draw(st.one_of(st.integers(1, 6), st.integers(4, 20)))
    return make_request(
        0,
        text[: draw(st.one_of(st.integers(1, 5), st.integers(1, 12)))],
        max_tokens,
        ends=draw(st.sampled_from([False, False, True])),
        min_tokens=draw(st.integers(0, min(2, max_tokens))),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        seed=draw(st.integers(0, 3)),
        priority=draw(st.integers(0, 2)),
        deadline=draw(st.sampled_from([None, None, None, None, None, 5.0, 7.0])),
        cache_salt=draw(st.sampled_from(["", "", "", "tenant"])),
        # Those of a number are of one call; `of_call` makes it a key.
        call=draw(st.sampled_from([None, None, 0, 1])),
    )


ADD = requests_of()
INTERRUPTIONS = st.one_of(
    st.tuples(st.just("finish"), st.integers(0, 15)),
    st.tuples(st.just("stop"), st.integers(0, 15)),
    st.tuples(st.just("expire"), st.integers(1, 8)),
    st.sampled_from(["reset", "reset", "reset", "fail"]),
)
STEPS = st.sampled_from(["launch", "launch", "launch", "commit", "step"])
OPERATIONS = st.tuples(
    st.lists(ADD, min_size=2, max_size=6),
    st.lists(st.one_of(STEPS, STEPS, STEPS, STEPS, ADD, INTERRUPTIONS), min_size=10, max_size=60),
).map(lambda parts: [*parts[0], *parts[1]])


def submit(simulation: Simulation, request: Request) -> bool:
    """Add a request; a refusal must leave no trace."""
    before = simulation.scheduler.num_waiting
    empty_queue_refused = False
    try:
        simulation.add(request)
    except QueueFullError:
        empty_queue_refused = before == 0
    except RequestError:
        pass
    else:
        return True
    assert not empty_queue_refused
    assert simulation.scheduler.num_waiting == before
    return False


def of_call(request: Request, key: int, firsts: dict[int, int]) -> Request:
    """The request with its own key, and with that of the first one of its call."""
    call = None if request.call is None else firsts.setdefault(request.call, key)
    return msgspec.structs.replace(request, key=key, call=call)


def run(simulation: Simulation, operations: list[object]) -> None:
    next_key = 0
    now = 0.0
    firsts: dict[int, int] = {}
    for operation in operations:
        match operation:
            case Request():
                request = of_call(operation, next_key, firsts)
                next_key += 1
                submit(simulation, request)
            case "launch":
                simulation.launch()
            case "commit":
                simulation.commit()
            case "step":
                simulation.step()
            case "reset":
                simulation.scheduler.reset_prefix_cache()
            case "fail":
                simulation.fail_step()
            case ("finish", int(key)):
                simulation.finish(key)
            case ("stop", int(key)):
                simulation.finish(key, FinishReason.STOP)
            case ("expire", int(step)):
                now = max(now, float(step))
                simulation.expire(now)
        scheduler = simulation.scheduler
        limits = simulation.limits
        assert 0.0 <= scheduler.kv_usage <= 1.0
        assert scheduler.num_running <= limits.max_num_seqs
        assert scheduler.pool_is_whole()
    simulation.drain()


@given(limits=limits_of(), depth=st.integers(1, 3), operations=OPERATIONS)
@thorough
def test_anything_may_happen_at_any_moment(
    limits: SchedulerLimits, depth: int, operations: list[object]
) -> None:
    run(Simulation(limits, depth), operations)


REQUESTS = st.lists(st.tuples(requests_of(), st.integers(0, 2)), min_size=1, max_size=12)


def outcome(
    limits: SchedulerLimits, depth: int, requests: list[tuple[Request, int]]
) -> tuple[dict[int, list[int]], dict[int, FinishReason], Simulation]:
    """Add the requests with so many steps between them, and run to the end."""
    simulation = Simulation(limits, depth)
    firsts: dict[int, int] = {}
    for key, (request, steps) in enumerate(requests):
        request = of_call(request, key, firsts)
        submit(simulation, msgspec.structs.replace(request, deadline=None))
        for _ in range(steps):
            simulation.step()
    simulation.drain()
    return simulation.outputs, simulation.finished, simulation


@given(limits=limits_of(max_waiting_requests=99, max_waiting_tokens=9999), requests=REQUESTS)
@thorough
def test_depth_two_equals_depth_one(
    limits: SchedulerLimits, requests: list[tuple[Request, int]]
) -> None:
    one = outcome(limits, 1, requests)
    two = outcome(limits, 2, requests)
    assert one[:2] == two[:2]


@given(limits=limits_of(), depth=st.integers(1, 2), requests=REQUESTS)
@thorough
def test_same_calls_same_plans(
    limits: SchedulerLimits, depth: int, requests: list[tuple[Request, int]]
) -> None:
    first = outcome(limits, depth, requests)[2]
    again = outcome(limits, depth, requests)[2]
    assert first.plans == again.plans
    assert first.scheduler.stats == again.scheduler.stats


@given(
    limits=limits_of(max_num_seqs=4, max_num_batched_tokens=8, enable_prefix_caching=True),
    requests=REQUESTS,
)
@thorough
def test_the_cache_changes_work_but_not_answers(
    limits: SchedulerLimits, requests: list[tuple[Request, int]]
) -> None:
    cached = outcome(limits, 2, requests)
    plain = outcome(msgspec.structs.replace(limits, enable_prefix_caching=False), 2, requests)
    shared = cached[0].keys() & plain[0].keys()  # a full queue may refuse at other moments
    assert {key: cached[0][key] for key in shared} == {key: plain[0][key] for key in shared}
    assert plain[2].scheduler.stats.prefix_cache_hits == 0
