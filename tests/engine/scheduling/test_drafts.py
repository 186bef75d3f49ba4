"""Plans with drafts: bounds on what steps in flight compute, and what drafts may take."""

from __future__ import annotations

import msgspec
import pytest

from src.core.outputs import FinishReason
from src.core.plan import RowResult, RowStep, StepPlan, StepResult, drafted_tokens, has_computed
from src.engine.kv.block_pool import InvariantError
from src.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.fake_worker import END_TOKEN
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request


def drafting(**changes: object) -> Scheduler:
    settings: dict[str, object] = {
        "max_num_batched_tokens": 16,
        "num_blocks": 40,
        "max_drafts": 3,
        "lookahead_tokens": 2,
    }
    return Scheduler(make_limits(**(settings | changes)))


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check()
    return plan


def answer(plan: StepPlan, *tokens: list[int]) -> StepResult:
    return StepResult(
        plan.step_id,
        [
            RowResult(step.row, step.generation, given)
            for step, given in zip(plan.rows, tokens, strict=True)
        ],
    )


def begun(scheduler: Scheduler, max_tokens: int = 12, *, ends: bool = False) -> None:
    """A request of 3 tokens whose prompt is computed, and whose first token is 5."""
    scheduler.add(make_request(0, 3, max_tokens, ends=ends))
    scheduler.commit(answer(planned(scheduler), [5]))


def test_a_decoding_row_may_draft_and_a_prompt_may_not() -> None:
    scheduler = drafting()
    scheduler.add(make_request(0, 3, 12, ends=False))
    plan = planned(scheduler)
    assert [(step.num_tokens, step.drafts) for step in plan.rows] == [(3, 0)]
    scheduler.commit(answer(plan, [5]))
    plan = planned(scheduler)
    [step] = plan.rows
    assert (step.start, step.num_tokens, step.drafts, step.slack, step.limit) == (3, 4, 3, 0, 15)
    assert (step.num_sampled, plan.num_tokens, plan.num_drafts) == (4, 4, 3)


@pytest.mark.parametrize("accepted", range(4))
def test_a_step_behind_drafts_begins_somewhere_between(accepted: int) -> None:
    scheduler = drafting()
    begun(scheduler)
    first, second = planned(scheduler), planned(scheduler)
    [step] = second.rows
    assert (step.start, step.slack, step.drafts) == (4, 3, 3)
    [event] = scheduler.commit(answer(first, [6] * (1 + accepted)))
    assert event.token_ids == [6] * (1 + accepted)
    state = scheduler.state(0)
    assert state is not None
    # The second step is in flight: it gives a token at least.
    assert (state.committed, state.target - state.slack) == (4 + accepted, 6 + accepted)
    assert (state.slack, state.launched) == (3, 8 + accepted)
    scheduler.commit(answer(second, [7]))
    assert (state.slack, state.launched, state.target) == (0, 5 + accepted, 6 + accepted)
    [step] = planned(scheduler).rows
    assert (step.start, step.slack) == (5 + accepted, 0)


def test_an_output_ends_within_accepted_drafts() -> None:
    scheduler = drafting()
    begun(scheduler, ends=True)
    first, second = planned(scheduler), planned(scheduler)
    [event] = scheduler.commit(answer(first, [6, END_TOKEN, 6, 6]))
    assert (event.token_ids, event.finish_reason) == ([6, END_TOKEN], FinishReason.STOP)
    assert event.stop_token_id == END_TOKEN
    assert scheduler.stats.discarded_tokens == 2
    assert scheduler.commit(answer(second, [6, 6])) == []
    assert scheduler.stats.discarded_tokens == 4
    scheduler.check_idle()


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_nothing_is_planned_beyond_max_tokens(max_tokens: int) -> None:
    scheduler = drafting()
    scheduler.add(make_request(0, 3, max_tokens, ends=False))
    scheduler.commit(answer(planned(scheduler), [5]))
    given = 1
    while scheduler.has_work:
        [step] = planned(scheduler).rows
        assert step.num_sampled <= max_tokens - given
        given += step.num_sampled
        plan = scheduler._in_flight[0][0]
        scheduler.commit(answer(plan, [6] * step.num_sampled))
    assert given == max_tokens


def test_a_step_behind_drafts_may_find_nothing_to_do() -> None:
    scheduler = drafting()
    begun(scheduler, max_tokens=5)
    first, second = planned(scheduler), planned(scheduler)
    assert second.rows[0].limit == 8
    [event] = scheduler.commit(answer(first, [6, 6, 6, 6]))
    assert event.finish_reason is FinishReason.LENGTH
    assert scheduler.commit(answer(second, [])) == []
    scheduler.check_idle()


def test_a_step_behind_drafts_up_to_the_end_may_have_as_many() -> None:
    """Whatever comes of those before it, the device writes nothing behind the end."""
    scheduler = drafting(max_drafts=6)
    begun(scheduler, max_tokens=8)
    first, second = planned(scheduler), planned(scheduler)
    assert [plan.rows[0].drafts for plan in (first, second)] == [6, 5]
    [event] = scheduler.commit(answer(first, [6]))
    assert event.finish_reason is None
    [event] = scheduler.commit(answer(second, [6] * 6))
    assert event.finish_reason is FinishReason.LENGTH
    scheduler.check_idle()


@pytest.mark.parametrize("count", [0, 5])
def test_another_number_of_tokens_than_may_come_is_refused(count: int) -> None:
    scheduler = drafting()
    begun(scheduler)
    with pytest.raises(InvariantError, match=f"{count} tokens came back, 1 to 4 expected"):
        scheduler.commit(answer(planned(scheduler), [6] * count))


def test_drafts_get_the_budget_that_is_left() -> None:
    scheduler = drafting(max_num_batched_tokens=6, prefill_tokens_per_decode=0)
    begun(scheduler)
    scheduler.add(make_request(1, 4, 4, ends=False))
    first, second = planned(scheduler).rows
    assert (first.drafts, second.num_tokens, second.drafts) == (1, 4, 0)


def test_drafts_take_no_block_while_a_request_waits() -> None:
    scheduler = drafting(max_num_seqs=1)
    begun(scheduler)
    scheduler.add(make_request(1, 4, 4, ends=False))
    plan = planned(scheduler)
    # Two tables of two: position 3 has its block, and so would no draft.
    assert [step.drafts for step in plan.rows] == [0]
    assert not plan.block_appends


def test_drafts_leave_the_look_ahead_of_every_row() -> None:
    # A row needs 2 more blocks soon, and may have them for drafts; a second one needs as many.
    for num_blocks, rows, drafts in ((4, 1, 3), (8, 2, 3), (7, 2, 0)):
        scheduler = drafting(num_blocks=num_blocks)
        for key in range(rows):
            scheduler.add(make_request(key, 3, 6, ends=False))
        scheduler.commit(answer(planned(scheduler), *[[5]] * rows))
        plan = planned(scheduler)
        assert [step.drafts for step in plan.rows] == [drafts] * rows
        assert bool(plan.block_appends) == bool(drafts)


def test_nobody_is_preempted_for_a_block_that_perhaps_nobody_needs() -> None:
    scheduler = drafting(num_blocks=7, lookahead_tokens=0, max_num_seqs=2, max_drafts=4)
    scheduler.add(make_request(0, 3, 8, ends=False))
    scheduler.add(make_request(1, 3, 8, ends=False))
    scheduler.commit(answer(planned(scheduler), [5], [5]))
    plans = [planned(scheduler)]
    while (plan := scheduler.schedule()) is not None and len(plans) < 4:
        plans.append(plan)
    assert any(step.drafts for step in plans[0].rows)
    assert scheduler.stats.preemptions == 0


def test_no_draft_reaches_where_recurrent_states_are_copied() -> None:
    """Of blocks of 2 tokens every fourth ends where a copy is due: at 8 positions."""
    scheduler = drafting(num_snapshots=2, snapshot_interval=4, block_size=2)
    scheduler.add(make_request(0, 1, 20, ends=False))
    scheduler.commit(answer(planned(scheduler), [5]))
    found = []
    for _ in range(7):
        plan = planned(scheduler)
        [step] = plan.rows
        found.append((step.start, step.drafts, len(plan.state_saves)))
        scheduler.commit(answer(plan, [5]))
    drafts = (3, 3, 3, 2, 1, 0, 0)
    assert found == [(1 + step, most, step == 6) for step, most in enumerate(drafts)]


def test_states_behind_drafts_in_flight_are_not_copied() -> None:
    scheduler = drafting(num_snapshots=2, snapshot_interval=4, block_size=2)
    scheduler.add(make_request(0, 1, 20, ends=False))
    for _ in range(3):
        scheduler.commit(answer(planned(scheduler), [5]))
    first = planned(scheduler)
    assert [(step.start, step.drafts) for step in first.rows] == [(3, 3)]
    # If all drafts are right, it reaches 7 positions, and the step behind it 8.
    behind = planned(scheduler)
    assert [(step.start, step.slack, step.drafts) for step in behind.rows] == [(4, 3, 0)]
    assert not behind.state_saves
    scheduler.commit(answer(first, [5, 5, 5, 5]))


def test_drafts_and_right_ones_are_counted() -> None:
    rows = [
        RowResult(0, 1, [1, 2], drafted=3, accepted=1),
        RowResult(1, 1, [1]),
        RowResult(2, 1, [1], drafted=2),
    ]
    assert drafted_tokens(StepResult(1, rows)) == (5, 1)


def test_an_event_says_which_drafts_its_output_has() -> None:
    scheduler = drafting()
    begun(scheduler, ends=True)
    plan: StepPlan | None = planned(scheduler)
    for tokens, accepted in (([6, 6, 6], 2), ([6, END_TOKEN, 6, 6], 2)):
        assert plan is not None
        [step] = plan.rows
        given = RowResult(
            step.row, step.generation, tokens, drafted=3, accepted=len(tokens) - 1, source="suffix"
        )
        [event] = scheduler.commit(StepResult(plan.step_id, [given]))
        assert (event.drafted, event.accepted, event.source) == (3, accepted, "suffix")
        plan = scheduler.schedule()
    assert event.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_save_steps_and_change_no_answer(depth: int) -> None:
    steps = []
    for drafts in (0, 5):
        limits = make_limits(num_blocks=199, max_num_batched_tokens=64, max_drafts=drafts)
        simulation = Simulation(limits, depth)
        for key in range(4):
            simulation.add(make_request(key, 5, 40, ends=False, seed=key))
        simulation.drain()
        steps.append(simulation.scheduler.stats.steps)
        assert (simulation.worker.num_accepted > 20) == bool(drafts)
    assert steps[1] < 0.75 * steps[0]


@pytest.mark.parametrize("rests", [1, 2, 5])
def test_a_row_that_rests_is_planned_exactly(rests: int) -> None:
    scheduler = drafting()
    begun(scheduler, max_tokens=40)
    plans = [planned(scheduler), planned(scheduler)]
    [step] = plans[0].rows
    result = RowResult(step.row, step.generation, [6], rests=rests)
    scheduler.commit(StepResult(plans[0].step_id, [result]))
    scheduler.commit(answer(plans[1], [6]))
    drafts = []
    for _ in range(6):
        plan = planned(scheduler)
        drafts.append(plan.num_drafts > 0)
        scheduler.commit(answer(plan, [6]))
    # One of the steps was planned before anybody knew.
    assert drafts == [False] * (rests - 1) + [True] * (7 - rests)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_table_grows_past_the_end_of_the_context(depth: int) -> None:
    """There the bound of what is launched is the end itself, and drafts lie behind it."""
    limits = make_limits(
        max_num_batched_tokens=64, num_blocks=64, block_size=4, max_model_len=64, max_drafts=16
    )  # fmt: skip
    simulation = Simulation(limits, depth)
    simulation.add(make_request(0, 8, 56, ends=False))
    simulation.drain()


@pytest.mark.parametrize(("rows", "most"), [(1, 8), (8, 64), (12, 64), (64, 64), (80, 80)])
def test_drafts_make_logits_no_larger_than_rows_do(rows: int, most: int) -> None:
    """A step samples as many positions as there may be rows, or a few dozen."""
    scheduler = drafting(
        max_num_batched_tokens=512, num_blocks=512, max_num_seqs=rows, max_drafts=7
    )
    for key in range(rows):
        scheduler.add(make_request(key, 3, 30, ends=False))
    plan = planned(scheduler)
    while len(plan.rows) < rows or plan.installs:
        scheduler.commit(answer(plan, *[[5]] * len(plan.rows)))
        plan = planned(scheduler)
    sampled = [step.num_sampled for step in plan.rows]
    assert sum(sampled) == most
    assert scheduler.limits.max_sampled == max(rows, 64)


def test_rows_share_the_drafts_of_a_step() -> None:
    """What a row near its end does not want is for the others."""
    scheduler = drafting(max_num_batched_tokens=16, num_blocks=512, max_drafts=7)
    for key, max_tokens in enumerate((30, 4, 30, 30)):
        scheduler.add(make_request(key, 3, max_tokens, ends=False))
    plan = planned(scheduler)
    assert len(plan.rows) == 4
    scheduler.commit(answer(plan, [5], [5], [5], [5]))
    assert [step.drafts for step in planned(scheduler).rows] == [4, 2, 3, 3]


def test_a_row_with_a_grammar_may_draft_too() -> None:
    scheduler = drafting()
    for key, grammar in enumerate((None, object())):
        request = make_request(key, 3, 12, ends=False)
        scheduler.add(msgspec.structs.replace(request, grammar=grammar))
    scheduler.commit(answer(planned(scheduler), [5], [5]))
    assert [step.drafts for step in planned(scheduler).rows] == [3, 3]


@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_drafts_make_the_next_step_want_no_block(block_size: int) -> None:
    """While a request waits for memory a row has what it has; its drafts leave it a position."""
    scheduler = drafting(max_num_seqs=1, block_size=block_size, max_drafts=16, num_blocks=64)
    scheduler.add(make_request(0, 3, 40, ends=False))
    scheduler.add(make_request(1, 3, 4, ends=False))
    scheduler.commit(answer(planned(scheduler), [5]))
    drafted = 0
    for _ in range(15):
        first = planned(scheduler)
        second = planned(scheduler)
        drafted += first.num_drafts
        if first.num_drafts:
            assert not second.block_appends
        scheduler.commit(answer(first, [6]))
        scheduler.commit(answer(second, [6]))
    assert (drafted > 0) == (block_size > 2)


def test_a_step_whose_rows_have_all_ended_computes_nothing() -> None:
    past, begun_, chunk = (RowStep(row, 1, 4, 1, row < 2) for row in range(3))
    none, one = RowResult(0, 1, []), RowResult(1, 1, [7])
    for steps, rows, expected in (
        ([past], [none], False),
        ([past, begun_], [none, one], True),
        ([past, chunk], [none, none], True),
    ):
        assert has_computed(StepPlan(1, [], [], steps), StepResult(1, rows)) is expected


@pytest.mark.parametrize(
    ("rests", "drafts"), [(0, [True] * 3), (-1, [True] * 3), (2, [False, True, True])]
)
def test_a_row_has_no_drafts_before_its_first_result_says_so(
    rests: int, drafts: list[bool]
) -> None:
    """Nobody has looked at its text before, and most texts have nothing to draft."""
    scheduler = drafting(looks_first=True)
    scheduler.add(make_request(0, 3, 40, ends=False))
    first, second = planned(scheduler), planned(scheduler)
    [step] = first.rows
    assert [each.num_drafts for each in (first, second)] == [0, 0]
    result = RowResult(step.row, step.generation, [5], rests=rests)
    scheduler.commit(StepResult(first.step_id, [result]))
    found = [planned(scheduler)]
    scheduler.commit(answer(second, [6]))
    for _ in drafts[1:]:
        found.append(planned(scheduler))
        scheduler.commit(answer(found[-2], [6]))
    assert [plan.num_drafts > 0 for plan in found] == drafts


@pytest.mark.parametrize(
    ("looks_first", "given", "drafts"),
    [(True, {}, 0), (False, {}, 3), (True, {"prediction": b""}, 3), (True, {"grammar": 0}, 3)],
)
def test_who_has_something_to_expect_drafts_at_once(
    looks_first: bool, given: dict[str, object], drafts: int
) -> None:
    scheduler = drafting(looks_first=looks_first)
    request = make_request(0, 3, 12, ends=False)
    scheduler.add(msgspec.structs.replace(request, **given))
    assert [planned(scheduler).num_drafts for _ in range(2)] == [0, drafts]


def test_a_request_that_was_preempted_is_told_again() -> None:
    scheduler = drafting(looks_first=True)
    begun(scheduler)
    [state] = scheduler._allocator.running
    assert state.rests == 0
    scheduler._preempt(state)
    plan = planned(scheduler)
    assert len(plan.installs) == 1
    assert [each.num_drafts for each in (plan, planned(scheduler))] == [0, 0]
    scheduler.commit(answer(plan, [6]))
    assert state.rests == 0
