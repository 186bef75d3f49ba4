"""Who waits for a prefix that somebody is computing, and who does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.core.outputs import FinishReason
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request
from tests.engine.scheduling.test_scheduler import row_of, shape, turn

# Blocks have two tokens, a step has eight.
PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]


def roomy(**changes: object) -> Simulation:
    return Simulation(make_limits(num_blocks=64, **changes))


def test_who_shares_most_of_a_prompt_waits_until_it_is_computed() -> None:
    simulation = roomy()
    simulation.add(make_request(0, PROMPT, 3, ends=False))
    simulation.add(make_request(1, [*PROMPT[:10], 6], 3, ends=False))
    simulation.add(make_request(2, PROMPT, 3, ends=False))
    assert shape(turn(simulation)) == {0: (0, 8)}
    # Half of the others' prompts is computed, and what follows is on its way.
    assert shape(turn(simulation)) == {0: (8, 4)}
    assert shape(turn(simulation)) == {0: (12, 1), 1: (10, 1), 2: (10, 2)}
    simulation.drain()
    assert [simulation.first_events[key].cached_tokens for key in range(3)] == [0, 10, 10]


def test_the_completions_of_one_prompt_compute_it_once() -> None:
    simulation = roomy(max_num_batched_tokens=16)
    for key in range(4):
        simulation.add(make_request(key, PROMPT, 2, ends=False))
    assert shape(turn(simulation)) == {0: (0, 12)}
    assert shape(turn(simulation)) == {0: (12, 1), 1: (10, 2), 2: (10, 2), 3: (10, 2)}
    simulation.drain()


def test_a_short_common_beginning_is_computed_twice() -> None:
    simulation = roomy(max_num_batched_tokens=32)
    simulation.add(make_request(0, PROMPT, 2, ends=False))
    simulation.add(make_request(1, [*PROMPT[:4], 6, 6, 6, 6, 6, 6], 2, ends=False))
    assert shape(turn(simulation)) == {0: (0, 12), 1: (0, 10)}
    simulation.drain()


def test_others_go_past_those_who_wait() -> None:
    simulation = roomy(max_num_batched_tokens=32)
    simulation.add(make_request(0, PROMPT, 2, ends=False))
    for key in (1, 2, 3):
        simulation.add(make_request(key, PROMPT, 2, ends=False))
    simulation.add(make_request(4, [5, 5, 5], 2, ends=False))
    turn(simulation)
    assert row_of(simulation, 4) >= 0
    assert row_of(simulation, 1) == -1
    # Nobody was first in line and did not fit.
    assert simulation.scheduler.stats.bypasses == 0
    simulation.drain()


def test_what_a_salt_keeps_apart_is_not_waited_for() -> None:
    simulation = roomy(max_num_batched_tokens=32)
    simulation.add(make_request(0, PROMPT, 2, ends=False))
    simulation.add(make_request(1, PROMPT, 2, ends=False, cache_salt="other"))
    assert shape(turn(simulation)) == {0: (0, 12), 1: (0, 12)}
    simulation.drain()


def test_who_wants_scores_of_its_prompt_does_not_wait_for_what_it_may_not_read() -> None:
    simulation = roomy(max_num_batched_tokens=32)
    simulation.add(make_request(0, PROMPT, 2, ends=False))
    simulation.add(make_request(1, PROMPT, 2, ends=False, prompt_logprobs=1))
    assert shape(turn(simulation)) == {0: (0, 12), 1: (0, 12)}
    simulation.drain()


def test_without_a_cache_nobody_waits() -> None:
    simulation = roomy(max_num_batched_tokens=32, enable_prefix_caching=False)
    for key in range(2):
        simulation.add(make_request(key, PROMPT, 2, ends=False))
    assert shape(turn(simulation)) == {0: (0, 12), 1: (0, 12)}
    simulation.drain()


@pytest.mark.parametrize("how", ["finish", "reset"])
def test_what_nobody_will_find_is_not_waited_for(how: str) -> None:
    simulation = Simulation(make_limits(num_blocks=64, max_num_batched_tokens=16), depth=2)
    simulation.add(make_request(0, PROMPT, 4, ends=False))
    assert shape(simulation.launch()) == {0: (0, 12)}
    simulation.add(make_request(1, PROMPT, 4, ends=False))
    assert simulation.waits_for_prefix() == {1}
    if how == "finish":
        simulation.finish(0)
        assert shape(simulation.launch()) == {1: (0, 12)}
    else:
        simulation.scheduler.reset_prefix_cache()
        assert shape(simulation.launch()) == {0: (12, 1), 1: (0, 12)}
    simulation.drain()


def test_one_behind_is_waited_for_when_it_is_on_its_way() -> None:
    limits = make_limits(num_blocks=64, max_num_batched_tokens=16, policy="priority")
    simulation = Simulation(limits, depth=2)
    simulation.add(make_request(0, PROMPT, 2, ends=False, priority=5))
    simulation.launch()
    simulation.add(make_request(1, PROMPT, 2, ends=False, priority=0))
    assert shape(simulation.launch()) == {0: (12, 1)}
    simulation.commit()
    assert shape(simulation.launch())[row_of(simulation, 1)] == (10, 2)
    simulation.drain()


def test_who_was_overtaken_often_enough_waits_no_more() -> None:
    limits = make_limits(num_blocks=64, max_num_batched_tokens=16, max_bypasses=3)
    simulation = Simulation(limits, depth=2)
    simulation.add(make_request(0, PROMPT, 2, ends=False))
    simulation.launch()
    simulation.add(make_request(1, PROMPT, 2, ends=False))
    simulation.scheduler._requests[1].bypasses = 3
    assert row_of(simulation, 1) == -1
    assert shape(simulation.launch())[1] == (0, 12)
    simulation.drain()


def _mixed(source: Callable[[int], int]) -> list[list[int]]:
    """Prompts of a few families, cut and continued at random."""
    prompts = []
    for _ in range(12):
        family = source(3)
        kept = source(len(PROMPT) + 1)
        prompts.append(
            [*(token % 6 + 1 for token in PROMPT[family:kept]), *[family + 1] * source(6), 1]
        )
    return prompts


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    depth=st.sampled_from([1, 2]),
    budget=st.integers(1, 24),
    blocks=st.integers(12, 40),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_everybody_is_served_whoever_waits_for_whom(
    data: st.DataObject, depth: int, budget: int, blocks: int, policy: str
) -> None:
    limits = make_limits(num_blocks=blocks, max_num_batched_tokens=budget, policy=policy)
    simulation = Simulation(limits, depth=depth)
    prompts = _mixed(lambda bound: data.draw(st.integers(0, bound - 1)))
    for key, prompt in enumerate(prompts):
        simulation.add(make_request(key, prompt, 3, priority=data.draw(st.integers(0, 2))))
        if data.draw(st.booleans()):
            simulation.launch()
            while len(simulation.worker.in_flight) >= depth:
                simulation.commit()
        if key and data.draw(st.integers(0, 5)) == 0:
            simulation.finish(data.draw(st.integers(0, key - 1)), FinishReason.ABORT)
        simulation.scheduler.check()
    simulation.drain()
    simulation.scheduler.check_idle()
