"""One example per rule of docs/scheduling.md."""

from __future__ import annotations

import msgspec
import pytest

from src.core.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from src.core.outputs import FinishReason
from src.core.plan import RowResult, StepPlan, StepResult
from src.core.request import Request
from src.engine.scheduling.scheduler import InvariantError, Scheduler
from tests.engine.scheduling.fake_worker import expected_output
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request


def shape(plan: StepPlan | None) -> dict[int, tuple[int, int]]:
    """Row -> (start, number of tokens)."""
    assert plan is not None
    return {step.row: (step.start, step.num_tokens) for step in plan.rows}


def turn(simulation: Simulation) -> StepPlan:
    """Launch one step and commit the oldest if the pipeline is full."""
    plan = simulation.launch()
    assert plan is not None
    if len(simulation.worker.in_flight) == simulation.depth:
        simulation.commit()
    return plan


def row_of(simulation: Simulation, key: int) -> int:
    return simulation.scheduler._requests[key].row


# Chunked prefill and decode under one budget.


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_one_samples() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request(0, 20, 2, ends=False))
    plans = [turn(simulation) for _ in range(4)]
    assert [shape(plan)[0] for plan in plans] == [(0, 8), (8, 8), (16, 4), (20, 1)]
    assert [plan.rows[0].samples for plan in plans] == [False, False, True, True]
    assert [len(plan.installs) for plan in plans] == [1, 0, 0, 0]
    simulation.drain()


def test_decodes_go_first_and_a_prefill_gets_what_is_left() -> None:
    simulation = Simulation(make_limits(num_blocks=64))
    for key in range(3):
        simulation.add(make_request(key, 2, 12, ends=False))
    turn(simulation)
    simulation.add(make_request(3, 14, 4, ends=False))
    assert shape(turn(simulation)) == {0: (2, 1), 1: (2, 1), 2: (2, 1), 3: (0, 5)}
    assert shape(turn(simulation)) == {0: (3, 1), 1: (3, 1), 2: (3, 1), 3: (5, 5)}
    simulation.drain()


def test_prefill_goes_on_under_the_heaviest_decode_load() -> None:
    simulation = Simulation(make_limits(max_num_batched_tokens=4, num_blocks=64))
    for key in range(3):
        simulation.add(make_request(key, 1, 30, ends=False))
    turn(simulation)
    simulation.add(make_request(3, 6, 1))
    for _ in range(6):
        assert len(turn(simulation).rows) == 4
    assert 3 in simulation.finished
    simulation.drain()


def test_there_are_never_more_running_rows_than_budget() -> None:
    simulation = Simulation(make_limits(max_num_batched_tokens=3, num_blocks=64))
    for key in range(4):
        simulation.add(make_request(key, 1, 20, ends=False))
    for _ in range(20):
        assert len(turn(simulation).rows) == 3
    assert len(simulation.finished) == 3
    simulation.drain()


# Waiting order.


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2, 3]), ("priority", [3, 1, 0, 2])])
def test_the_policy_orders_admissions(policy: str, order: list[int]) -> None:
    simulation = Simulation(make_limits(policy=policy, max_num_seqs=1))
    for key, priority in enumerate([1, 0, 1, -1]):
        simulation.add(make_request(key, 2, 1, priority=priority))
    simulation.drain()
    assert list(simulation.finished) == order


def test_smaller_requests_overtake_one_that_does_not_fit_but_only_so_often() -> None:
    simulation = Simulation(make_limits(max_bypasses=2, max_num_seqs=3, lookahead_tokens=0))
    simulation.add(make_request(0, 12, 8, ends=False))  # 6 to 10 of 12 blocks, for 10 steps
    turn(simulation)
    simulation.add(make_request(1, 18, 2, ends=False))  # 9 blocks
    for key in range(2, 7):
        simulation.add(make_request(key, 1, 1))
    while 0 not in simulation.finished:
        turn(simulation)
    assert list(simulation.finished) == [2, 3, 0]
    assert simulation.scheduler.stats.bypasses == simulation.overtaken[1] == 2
    assert {i.request_key for i in turn(simulation).installs} == {1}
    simulation.drain()
    assert sorted(simulation.finished) == list(range(7))


def test_the_queue_is_bounded_and_a_refused_request_leaves_no_trace() -> None:
    scheduler = Scheduler(make_limits(max_waiting_requests=1, max_model_len=16))
    with pytest.raises(PromptTooLongError):
        scheduler.add(make_request(0, 30, 4))
    scheduler.add(make_request(1, 4, 4))
    with pytest.raises(QueueFullError):
        scheduler.add(make_request(2, 4, 4))
    with pytest.raises(ValueError, match="key 1 is in use"):
        scheduler.add(make_request(1, 4, 4))
    assert (scheduler.num_waiting, scheduler.waiting_tokens, scheduler.num_running) == (1, 4, 0)
    assert scheduler.finish(0, FinishReason.ABORT) is None
    assert scheduler.finish(2, FinishReason.ABORT) is None
    assert scheduler.schedule() is not None
    assert (scheduler.num_waiting, scheduler.waiting_tokens, scheduler.num_running) == (0, 0, 1)


def test_an_empty_pool_takes_whatever_passed_the_door() -> None:
    simulation = Simulation(make_limits(num_blocks=4, lookahead_tokens=1000))
    simulation.add(make_request(0, 5, 4, ends=False))  # all 4 blocks in the end
    simulation.drain()
    assert simulation.finished == {0: FinishReason.LENGTH}


def test_lookahead_keeps_a_newcomer_out_that_would_be_preempted_at_once() -> None:
    for lookahead, preemptions in ((0, 1), (8, 0)):
        simulation = Simulation(make_limits(num_blocks=6, lookahead_tokens=lookahead))
        simulation.add(make_request(0, 6, 6, ends=False))
        turn(simulation)
        simulation.add(make_request(1, 4, 2, ends=False))
        simulation.drain()
        assert simulation.scheduler.stats.preemptions == preemptions


@pytest.mark.parametrize("lookahead", [0, 2])
def test_lookahead_is_of_the_newcomer_too(lookahead: int) -> None:
    simulation = Simulation(make_limits(num_blocks=4, lookahead_tokens=lookahead))
    simulation.add(make_request(0, 2, 2, ends=False))
    turn(simulation)
    simulation.add(make_request(1, 4, 4, ends=False))
    # Two blocks are left, and the other one takes no more: enough for its prompt alone.
    plan = simulation.launch()
    assert plan is not None
    assert [install.request_key for install in plan.installs] == ([] if lookahead else [1])
    simulation.drain()


@pytest.mark.parametrize("together", [True, False])
def test_lookahead_leaves_running_rows_what_they_will_take(together: bool) -> None:
    simulation = Simulation(make_limits(num_blocks=4))
    simulation.add(make_request(0, 2, 6, ends=False))  # 1 block now, 4 in the end
    if not together:
        turn(simulation)
    simulation.add(make_request(1, 1, 1))
    simulation.drain()
    assert list(simulation.finished) == [0, 1]


def test_running_rows_are_planned_by_rank_whenever_they_came() -> None:
    simulation = Simulation(make_limits(policy="priority"))
    simulation.add(make_request(0, 2, 5, ends=False, priority=1))
    turn(simulation)
    simulation.add(make_request(1, 2, 5, ends=False, priority=0))
    turn(simulation)
    assert list(shape(turn(simulation))) == [1, 0]
    simulation.drain()


# Preemption.


def pressed(depth: int = 1, **changes: object) -> Simulation:
    """Three running requests that grow until memory is short; keys 0 to 2, 2 blocks of 2 each."""
    limits = {"num_blocks": 7, "lookahead_tokens": 0, "max_num_batched_tokens": 64} | changes
    simulation = Simulation(make_limits(**limits), depth)
    for key in range(3):
        simulation.add(make_request(key, 3, 8, ends=False, priority=-key))
    return simulation


def test_the_first_in_line_is_never_preempted_and_the_last_gives_way() -> None:
    simulation = pressed()
    while not simulation.scheduler.stats.preemptions:
        turn(simulation)
    scheduler = simulation.scheduler
    assert scheduler.num_waiting == 1
    assert scheduler.num_running == 2
    assert row_of(simulation, 2) == -1
    # Told once.
    assert [scheduler.take_preempted() for _ in range(2)] == [[2], []]
    tokens = list(scheduler._requests[2].token_ids)
    while not any(install.request_key == 2 for install in turn(simulation).installs):
        pass
    install = simulation.plans[-1].installs[-1]
    assert install.request_key == 2
    assert install.token_ids == tokens == [*range(3000, 3003), *simulation.outputs[2][:-1]]
    assert install.prompt_len == 3
    assert install.generation == 2
    simulation.drain()
    assert next(iter(simulation.finished)) == 0


def test_the_least_important_class_gives_way_first() -> None:
    simulation = pressed(policy="priority", num_blocks=6)
    while not simulation.scheduler.stats.preemptions:
        turn(simulation)
    assert [row_of(simulation, key) >= 0 for key in range(3)] == [False, True, True]
    simulation.drain()


def test_in_a_class_the_least_to_recompute_gives_way() -> None:
    simulation = Simulation(
        make_limits(num_blocks=13, lookahead_tokens=0, max_num_batched_tokens=64)
    )
    for key, prompt in enumerate([3, 6, 14]):
        simulation.add(make_request(key, prompt, 6, ends=False))
    while not simulation.scheduler.stats.preemptions:
        turn(simulation)
    assert [row_of(simulation, key) >= 0 for key in range(3)] == [True, False, True]
    simulation.drain()


def test_the_last_in_line_waits_rather_than_push_out_somebody_ahead() -> None:
    simulation = Simulation(make_limits(num_blocks=6, lookahead_tokens=0))
    simulation.add(make_request(0, 5, 4, ends=False))  # has its 3rd block's second position left
    simulation.add(make_request(1, 4, 8, ends=False))
    simulation.add(make_request(2, 2, 1, ends=False))
    while 0 not in simulation.finished:
        turn(simulation)
    simulation.drain()
    assert simulation.scheduler.stats.shortages > 0
    assert simulation.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("num_blocks", [6, 7])
def test_behind_the_fence_blocks_are_awaited_and_no_second_victim_is_taken(
    num_blocks: int,
) -> None:
    simulation = pressed(depth=2, num_blocks=num_blocks)
    simulation.launch()
    while not simulation.scheduler.stats.preemptions:
        simulation.launch()
        if not simulation.scheduler.stats.preemptions:
            simulation.commit()
    scheduler = simulation.scheduler
    # The victim still has its row: a step in flight names it.
    assert scheduler.num_running == 3
    assert scheduler.num_waiting == 0
    assert row_of(simulation, 2) >= 0
    held = scheduler.kv_usage
    known = len(simulation.outputs[2])
    while scheduler.num_waiting == 0:
        simulation.commit()
    assert scheduler.kv_usage < held
    # What was being sampled for it then is not lost.
    assert len(simulation.outputs[2]) == known + 1
    assert scheduler.stats.preemptions == 1
    simulation.drain()


def test_nobody_is_preempted_while_a_row_is_about_to_end() -> None:
    simulation = Simulation(
        make_limits(num_blocks=6, lookahead_tokens=0, max_num_batched_tokens=64), depth=2
    )
    for key, max_tokens in enumerate([3, 3, 2]):
        simulation.add(make_request(key, 3, max_tokens, ends=False))
    while simulation.launch() is not None:
        pass
    simulation.drain()
    assert simulation.scheduler.stats.preemptions == 0
    assert simulation.scheduler.stats.shortages > 0


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    limits = make_limits(num_blocks=4, lookahead_tokens=0)
    simulation = Simulation(limits)
    for key, prompt in enumerate([3, 3, 1]):
        simulation.add(make_request(key, prompt, 5 if prompt == 3 else 1, ends=False))
    while not simulation.scheduler.stats.preemptions:
        plan = turn(simulation)
    assert simulation.scheduler._allocator.pool.num_free == 1  # enough for the third
    assert plan.installs == []
    simulation.drain()


def test_a_victim_that_ends_behind_its_fence_does_not_come_back() -> None:
    simulation = pressed(depth=2)
    simulation.launch()
    while not simulation.scheduler.stats.preemptions:
        simulation.launch()
        if not simulation.scheduler.stats.preemptions:
            simulation.commit()
    assert simulation.finish(2) is not None
    simulation.drain()
    assert simulation.finished[2] is FinishReason.ABORT


def test_no_answer_depends_on_preemption() -> None:
    simulation = pressed(depth=2, num_blocks=6, block_size=2)
    simulation.drain()
    assert simulation.scheduler.stats.preemptions >= 2
    for key, output in simulation.outputs.items():
        assert output == expected_output(simulation.worker.requests[key])[0]


# The pipeline.


def test_at_depth_two_a_row_is_planned_before_its_last_token_is_known() -> None:
    simulation = Simulation(make_limits(), depth=2)
    simulation.add(make_request(0, 3, 3, ends=False))
    plans = [simulation.launch(), simulation.launch()]
    assert [shape(plan)[0] for plan in plans] == [(0, 3), (3, 1)]
    assert simulation.outputs[0] == []
    simulation.drain()


def test_no_step_samples_beyond_max_tokens() -> None:
    simulation = Simulation(make_limits(), depth=3)
    simulation.add(make_request(0, 3, 2, ends=False))
    assert simulation.launch() is not None
    assert simulation.launch() is not None
    assert simulation.launch() is None
    simulation.drain()
    assert simulation.scheduler.stats.discarded_tokens == 0


def test_the_step_behind_an_end_token_is_dropped_and_holds_the_row_until_then() -> None:
    seed = next(
        seed
        for seed in range(1000)
        if len(expected_output(make_request(0, 3, 8, seed=seed))[0]) == 2
    )
    simulation = Simulation(make_limits(max_num_seqs=1), depth=2)
    simulation.add(make_request(0, 3, 8, seed=seed))
    simulation.add(make_request(1, 3, 1))
    simulation.launch()
    simulation.launch()
    simulation.commit()
    simulation.launch()  # samples a third token: the host does not know yet that the second ends it
    [event] = simulation.commit()
    assert event.finish_reason is FinishReason.STOP
    assert event.stop_token_id == event.token_ids[0]
    assert simulation.launch() is None  # the only row is behind its fence
    assert simulation.scheduler.kv_usage > 0
    assert simulation.commit() == []
    assert simulation.scheduler.stats.discarded_tokens == 1
    assert simulation.scheduler.kv_usage == 0
    assert simulation.launch() is not None
    simulation.drain()


def test_a_result_out_of_turn_or_of_other_rows_is_refused() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_request(0, 2, 4, ends=False))
    plan = scheduler.schedule()
    assert plan is not None
    [step] = plan.rows
    good = RowResult(step.row, step.generation, [3])
    with pytest.raises(InvariantError, match="step 2 is committed, the oldest is 1"):
        scheduler.commit(StepResult(2, [good]))
    for rows, message in [
        ([], "has 1 rows, its result 0"),
        ([RowResult(step.row, step.generation + 1, [3])], "generation 2 came back"),
        ([RowResult(step.row + 1, step.generation, [3])], "row 1 generation 1 came back"),
        ([RowResult(step.row, step.generation, [])], "0 tokens came back, 1 to 1 expected"),
    ]:
        with pytest.raises(InvariantError, match=message):
            scheduler.commit(StepResult(1, rows))
        scheduler = Scheduler(make_limits())
        scheduler.add(make_request(0, 2, 4, ends=False))
        scheduler.schedule()


def test_a_failed_step_can_be_told_to_its_requests() -> None:
    simulation = Simulation(make_limits(), depth=2)
    for key in range(2):
        simulation.add(make_request(key, 2, 4, ends=False))
    plan = simulation.launch()
    assert plan is not None
    assert simulation.scheduler.keys_of(plan) == [0, 1]
    simulation.finish(0)
    assert simulation.scheduler.keys_of(plan) == [1]
    simulation.finish(1, FinishReason.ERROR)
    # Whatever is committed for requests that have ended does not matter any more.
    rows = [RowResult(step.row, step.generation, []) for step in plan.rows]
    assert simulation.scheduler.commit(StepResult(plan.step_id, rows)) == []
    simulation.scheduler.check_idle()
    with pytest.raises(ValueError, match="step 1 is not in flight"):
        simulation.scheduler.keys_of(plan)


# The prefix cache.

SHARED = [1, 2, 3, 4, 5, 6, 7]


def test_a_repeated_prompt_computes_only_what_follows_its_full_blocks() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request(0, SHARED, 1))
    simulation.drain()
    simulation.add(make_request(1, SHARED, 1))
    simulation.add(make_request(2, SHARED[:6], 1))
    simulation.add(make_request(3, SHARED, 1, cache_salt="other"))
    assert shape(turn(simulation)) == {0: (6, 1), 1: (4, 2), 2: (0, 5)}
    simulation.drain()
    cached = [simulation.first_events[key].cached_tokens for key in range(4)]
    assert cached == [0, 6, 4, 0]
    stats = simulation.scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (7 + 7 + 6 + 7, 10)


def test_the_output_is_cached_too() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request(0, SHARED, 6, ends=False))
    simulation.drain()
    simulation.add(make_request(1, [*SHARED, *simulation.outputs[0]], 1))
    assert shape(turn(simulation)) == {0: (12, 1)}
    simulation.drain()


def test_what_is_not_committed_is_not_found() -> None:
    simulation = Simulation(make_limits(), depth=2)
    simulation.add(make_request(0, SHARED, 4, ends=False))
    simulation.launch()
    # It waits for nobody's prefix, since half of its prompt is its own.
    simulation.add(make_request(1, [*SHARED[:3], 1, 1, 1, 1], 4, ends=False))
    assert shape(simulation.launch())[1] == (0, 7)
    simulation.commit()
    simulation.add(make_request(2, SHARED, 4, ends=False))
    assert shape(simulation.launch())[2] == (6, 1)
    simulation.drain()


def test_without_caching_nothing_is_found() -> None:
    simulation = Simulation(make_limits(enable_prefix_caching=False))
    for key in range(2):
        simulation.add(make_request(key, SHARED, 1))
        assert shape(turn(simulation)) == {0: (0, 7)}
    assert simulation.scheduler.stats.prefix_cache_queries == 0


def test_a_reset_forgets_what_running_requests_computed_too() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request(0, SHARED, 4, ends=False))
    turn(simulation)
    simulation.scheduler.reset_prefix_cache()
    simulation.drain()
    simulation.add(make_request(1, SHARED, 1))
    assert shape(turn(simulation)) == {0: (0, 7)}


def test_a_block_begun_before_a_reset_is_not_cached_after_it() -> None:
    simulation = Simulation(make_limits(max_num_batched_tokens=1))
    simulation.add(make_request(0, SHARED, 1))
    turn(simulation)
    simulation.scheduler.reset_prefix_cache()
    simulation.drain()
    simulation.add(make_request(1, SHARED, 1))
    assert shape(turn(simulation)) == {0: (0, 1)}
    simulation.drain()


def test_a_resumed_request_finds_its_own_blocks_again() -> None:
    simulation = pressed(num_blocks=9, block_size=2)
    while not simulation.scheduler.stats.preemptions:
        turn(simulation)
    simulation.finish(0)
    simulation.finish(1)
    plan = turn(simulation)
    assert plan.installs[0].request_key == 2
    assert plan.rows[0].start >= 2
    simulation.drain()


# Prompt log-probabilities. The simulation checks each entry and that they come once, complete.


def test_prompt_logprobs_are_collected_over_chunks_and_do_not_read_the_cache() -> None:
    simulation = Simulation(make_limits(max_num_batched_tokens=3))
    simulation.add(make_request(0, SHARED, 1))
    simulation.drain()
    simulation.add(make_request(1, SHARED, 2, prompt_logprobs=1))
    assert shape(turn(simulation)) == {0: (0, 3)}
    simulation.drain()
    assert simulation.first_events[1].prompt_logprobs is not None


@pytest.mark.parametrize("prompt_logprobs", [0, None])
def test_preemption_in_the_middle_of_the_prompt(prompt_logprobs: int | None) -> None:
    limits = make_limits(num_blocks=8, lookahead_tokens=0, max_num_batched_tokens=3)
    simulation = Simulation(limits)
    simulation.add(make_request(0, 3, 10, ends=False))
    turn(simulation)
    simulation.add(make_request(1, 9, 2, ends=False, prompt_logprobs=prompt_logprobs))
    while not simulation.scheduler.stats.preemptions:
        turn(simulation)
    assert simulation.outputs[1] == []
    simulation.finish(0)
    resumed = turn(simulation).rows[0]
    simulation.drain()
    event = simulation.first_events[1]
    if prompt_logprobs is None:
        assert resumed.start > 0  # its own blocks are still cached
        assert event.cached_tokens == 0  # but were not when it first came
    else:
        assert resumed.start == 0
        assert event.prompt_logprobs is not None


def test_incomplete_prompt_logprobs_are_not_delivered() -> None:
    simulation = Simulation(make_limits(max_num_batched_tokens=3))
    simulation.add(make_request(0, SHARED, 2, prompt_logprobs=1))
    turn(simulation)
    event = simulation.finish(0)
    assert event is not None
    assert event.prompt_logprobs is None
    simulation.drain()


# Ending from outside.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(5))
def test_abort_at_any_moment(depth: int, steps: int) -> None:
    simulation = Simulation(make_limits(), depth)
    simulation.add(make_request(0, 12, 5, ends=False))
    for _ in range(steps):
        if simulation.launch() is None:
            simulation.commit()
    event = simulation.finish(0)
    assert event is not None
    assert event.finish_reason is FinishReason.ABORT
    assert event.token_ids == []
    assert simulation.finish(0) is None
    before = len(simulation.outputs[0])
    simulation.drain()
    assert len(simulation.outputs[0]) == before


def test_a_stop_string_ends_a_request_like_an_end_token() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request(0, 2, 9, ends=False))
    turn(simulation)
    event = simulation.finish(0, FinishReason.STOP)
    assert event is not None
    assert event.finish_reason is FinishReason.STOP
    assert event.stop_token_id is None
    simulation.drain()


def test_deadlines_end_waiting_and_running_requests() -> None:
    simulation = Simulation(make_limits(max_num_seqs=1))
    for key, deadline in enumerate([5.0, 3.0, None, 4.0]):
        simulation.add(make_request(key, 2, 9, ends=False, deadline=deadline))
    turn(simulation)
    assert simulation.expire(2.0) == []
    assert [event.key for event in simulation.expire(4.5)] == [1, 3]
    assert [event.key for event in simulation.expire(5.0)] == [0]
    simulation.drain()
    assert simulation.finished[2] is FinishReason.LENGTH


@pytest.mark.parametrize("end", ["length", "abort"])
def test_a_deadline_is_forgotten_with_its_request(end: str) -> None:
    simulation = Simulation(make_limits())
    for key in range(3):
        simulation.add(make_request(key, 2, 3, ends=False, deadline=1e9))
    if end == "abort":
        for key in range(3):
            simulation.finish(key)
    simulation.drain()
    assert not simulation.scheduler._deadlines._heap


def test_only_the_first_in_line_is_gone_past() -> None:
    simulation = Simulation(make_limits(max_bypasses=2, max_num_seqs=4, lookahead_tokens=0))
    simulation.add(make_request(0, 8, 9, ends=False))
    turn(simulation)
    # Neither of these fits beside it, and the next ones do.
    for key, length in ((1, 18), (2, 19), (3, 1), (4, 1)):
        simulation.add(make_request(key, length, 2, ends=False))
    simulation.launch()
    states = [simulation.scheduler.state(key) for key in (1, 2)]
    assert [state.bypasses for state in states if state is not None] == [2, 0]
    simulation.drain()


def test_a_failed_step_ends_its_requests_and_leaves_a_clean_scheduler() -> None:
    simulation = Simulation(make_limits(max_num_seqs=2), depth=2)
    for key in range(4):
        simulation.add(make_request(key, SHARED, 4, ends=False))
    simulation.launch()
    simulation.commit()
    simulation.launch()
    simulation.launch()
    simulation.finish(1)  # behind its fence when the step fails
    simulation.fail_step()
    assert simulation.finished == {0: FinishReason.ERROR, 1: FinishReason.ABORT}
    simulation.drain()
    assert [simulation.finished[key] for key in (2, 3)] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize("behind", [0, 1])
def test_nobody_finds_what_a_failed_step_should_have_computed(behind: int) -> None:
    """The prompt takes three steps; the second or third one fails, with the others in flight."""
    simulation = Simulation(make_limits(max_num_batched_tokens=4), depth=3)
    prompt = list(range(1, 13))
    simulation.add(make_request(0, prompt, 2, ends=False))
    for _ in range(3):
        simulation.launch()
    for _ in range(1 + behind):
        simulation.commit()
    simulation.fail_step()
    assert simulation.finished == {0: FinishReason.ERROR}
    simulation.add(make_request(1, prompt, 2, ends=False))
    simulation.drain()
    # Four tokens of each step that did not fail.
    assert simulation.first_events[1].cached_tokens == 4 * (1 + behind)


def test_a_failed_step_wipes_what_its_rows_compute_behind_it() -> None:
    simulation = Simulation(make_limits(max_num_batched_tokens=4), depth=3)
    simulation.add(make_request(0, 12, 2, ends=False))
    for _ in range(3):
        simulation.launch()
    held = dict(simulation.worker.memory)
    simulation.commit()
    simulation.fail_step()
    assert len(held) == 12
    assert simulation.worker.memory.items() == set(list(held.items())[:4])
    simulation.drain()


def test_check_idle_says_what_is_not() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.check_idle()
    scheduler.add(make_request(0, 2, 2))
    with pytest.raises(InvariantError, match="not idle: 1 requests"):
        scheduler.check_idle()
    scheduler.finish(0, FinishReason.ABORT)
    scheduler.check_idle()
    assert scheduler.pool_is_whole()
    scheduler._allocator.pool.allocate(1)
    assert not scheduler.pool_is_whole()
    with pytest.raises(InvariantError, match="idle, but 1 blocks are held and 11 free"):
        scheduler.check_idle()
    with pytest.raises(InvariantError, match="1 references, 0 tables"):
        scheduler.check()
    scheduler = Scheduler(make_limits())
    scheduler._allocator.rows.take()
    with pytest.raises(InvariantError, match="idle, but 3 rows are free of 4"):
        scheduler.check_idle()


def test_predictions_count_as_waiting() -> None:
    scheduler = Scheduler(make_limits(max_waiting_tokens=20))
    predicted = msgspec.structs.replace(make_request(0, 5, 2), prediction=bytes(4 * 9))
    scheduler.add(predicted)
    scheduler.check_queue(1, 6)
    with pytest.raises(QueueFullError, match="14 tokens are waiting, with 7 more"):
        scheduler.check_queue(1, 7)
    with pytest.raises(QueueFullError, match="14 tokens are waiting, with 14 more"):
        scheduler.add(msgspec.structs.replace(predicted, key=1))
    scheduler.finish(0, FinishReason.ABORT)
    assert scheduler._waiting.num_tokens == 0


def test_a_prediction_that_several_share_counts_once() -> None:
    """However many completions wait with it, and as long as one does."""
    scheduler = Scheduler(make_limits(max_waiting_tokens=40))
    prediction = bytes(4 * 9)

    def sharing(first: int, count: int) -> list[Request]:
        return [
            msgspec.structs.replace(make_request(first + index, 5, 2), prediction=prediction)
            for index in range(count)
        ]

    # Each by itself would be 14, and 56 together.
    scheduler.check_room(sharing(0, 4))
    scheduler.add_all(sharing(0, 4))
    [lane] = scheduler._waiting.lanes.values()
    assert scheduler._waiting.num_tokens == lane.num_tokens == 4 * 5 + 9
    # Equal text that another client has sent is memory of its own.
    other = msgspec.structs.replace(make_request(9, 1, 2), prediction=bytes(bytearray(4 * 9)))
    scheduler.add(other)
    assert scheduler._waiting.num_tokens == lane.num_tokens == 4 * 5 + 9 + 10
    scheduler.finish(9, FinishReason.ABORT)
    for key, left in ((0, 3 * 5 + 9), (2, 2 * 5 + 9), (3, 5 + 9), (1, 0)):
        scheduler.finish(key, FinishReason.ABORT)
        assert scheduler._waiting.num_tokens == lane.num_tokens == left
    assert not lane._sharing


def test_a_group_is_refused_as_a_whole() -> None:
    scheduler = Scheduler(make_limits(max_waiting_requests=4, max_waiting_tokens=20))

    def group(n: int, prompt: int, start: int = 10) -> list[Request]:
        return [make_request(start + index, prompt, 2) for index in range(n)]

    with pytest.raises(InvalidRequestError, match="n is 5, but at most 4 requests") as never:
        scheduler.check_room(group(5, 1))
    assert never.value.param == "n"
    with pytest.raises(InvalidRequestError, match=r"n is 3: 21 tokens .* 20 may") as never:
        scheduler.check_room(group(3, 7))
    assert never.value.param == "n"
    with pytest.raises(PromptTooLongError):
        scheduler.check_room(group(3, 70))
    scheduler.check_room(group(1, 22))  # one alone always fits an empty queue
    scheduler.check_room(group(4, 5))

    scheduler.add(make_request(0, 11, 2))
    scheduler.check_room(group(3, 3))
    with pytest.raises(QueueFullError, match="11 tokens are waiting, with 12 more"):
        scheduler.check_room(group(3, 4))
    with pytest.raises(QueueFullError, match="1 requests are waiting, 4 more are asked for"):
        scheduler.check_room(group(4, 1))
    # All or none.
    with pytest.raises(QueueFullError, match="11 tokens are waiting, with 12 more"):
        scheduler.add_all(group(3, 4))
    with pytest.raises(ValueError, match="request key 0 is in use"):
        scheduler.add_all([*group(2, 1), make_request(0, 1, 2)])
    assert scheduler.num_waiting == 1
    scheduler.add_all(group(3, 3))
    assert scheduler.num_waiting == 4


def test_a_plan_is_plain_data() -> None:
    simulation = Simulation(make_limits())
    simulation.add(make_request(0, 12, 3))
    simulation.drain()
    for plan in simulation.plans:
        assert msgspec.json.decode(msgspec.json.encode(plan), type=StepPlan) == plan
