"""Drafts delay nobody: who is installed, and when, beside an engine without drafts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.core.blocks import Chunk, blocks_for
from src.core.plan import StepPlan
from src.core.request import Request
from src.engine.scheduling.request_state import Phase, RequestState
from src.engine.scheduling.scheduler import SchedulerLimits
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request
from tests.engine.scheduling.test_properties import EXAMPLES, thorough

few = settings(thorough, max_examples=int(EXAMPLES or 60))
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


class Wrong(random.Random):
    """As many drafts as a step may have, all of them wrong; no row rests."""

    def randint(self, a: int, b: int) -> int:
        return b

    def random(self) -> float:
        return 1.0

    def choice(self, seq: object) -> int:  # type: ignore[override]
        return 0


def steps_until_installed(limits: SchedulerLimits, depth: int, prompt: int) -> int:
    """Steps until a second request is installed, beside a first one whose drafts are all wrong."""
    simulation = Simulation(limits, depth)
    simulation.worker.random = Wrong()
    simulation.add(make_request(0, 3, 37, ends=False))
    for _ in range(2):
        simulation.step()
    simulation.add(make_request(1, prompt, 4, ends=False))
    before = len(simulation.plans)
    while not any(i.request_key == 1 for plan in simulation.plans for i in plan.installs):
        simulation.step()
    return len(simulation.plans) - before


@DEPTHS
def test_a_request_comes_in_near_a_full_pool_as_without_drafts(depth: int) -> None:
    """The row's drafts would reach into its second block of four; the newcomer needs three."""
    taken = [
        steps_until_installed(
            make_limits(
                num_blocks=4,
                block_size=16,
                max_num_batched_tokens=64,
                max_drafts=drafts,
                lookahead_tokens=8,
            ),
            depth,
            prompt=38,
        )
        for drafts in (0, 16)
    ]
    assert taken[0] == taken[1] <= depth


@DEPTHS
def test_the_first_drafts_leave_a_position_for_each_step_that_may_be_ahead(depth: int) -> None:
    """No block is wanted for a step whose tokens are there only if drafts in flight are right."""
    limits = make_limits(
        num_blocks=8,
        block_size=16,
        max_num_batched_tokens=64,
        max_drafts=16,
        max_num_seqs=1,
        max_model_len=128,
    )
    simulation = Simulation(limits, depth)
    simulation.worker.random = Wrong()
    simulation.add(make_request(0, 3, 100, ends=False))
    simulation.launch()
    if depth == 1:
        simulation.commit()
    simulation.launch()
    (step,) = simulation.plans[1].rows
    state = simulation.scheduler.state(0)
    assert state is not None
    assert step.drafts > 0
    # Where the row may end behind this step, the one before it in flight included.
    assert state.launched + max(1, depth - 1) <= state.capacity
    simulation.drain()


def test_blocks_that_were_lent_for_drafts_come_back() -> None:
    """While there is room for the longest request, drafts reach further; then it ends."""
    limits = make_limits(
        num_blocks=24, block_size=4, max_num_batched_tokens=64, max_drafts=16, max_num_seqs=2
    )
    simulation = Simulation(limits)
    simulation.worker.random = Wrong()
    simulation.add(make_request(0, 3, 40, ends=False))
    for _ in range(3):
        simulation.step()
    state = simulation.scheduler.state(0)
    assert state is not None
    # 5 positions are known, and 8 of the look-ahead; drafts take 17 and one position.
    assert len(state.block_ids[0]) == 6 > blocks_for(5 + limits.lookahead_tokens, 4)
    simulation.add(make_request(1, 58, 6, ends=False))
    simulation.launch()
    assert simulation.plans[-1].installs
    assert len(state.block_ids[0]) == 4
    simulation.drain()


PROMPTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 24), st.integers(0, 2), st.integers(0, 3)),
    min_size=2,
    max_size=12,
)


@st.composite
def tight(draw: st.DrawFn, /, **changes: object) -> SchedulerLimits:
    """A pool that a few requests fill, in which a longest one has no room beside others."""
    size = draw(st.integers(1, 8))
    windows = draw(st.sampled_from([(None,), (None, None)]))
    most = len(windows) * blocks_for(48, size)
    values: dict[str, object] = {
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.sampled_from([4, 8, 64])),
        "max_mixed_prefill_tokens": draw(st.sampled_from([None, None, 4])),
        "block_size": size,
        "num_blocks": draw(st.integers(-(-most // 2), most)),
        "windows": windows,
        "max_model_len": 4096,
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "max_bypasses": draw(st.sampled_from([0, 2, 64])),
        "lookahead_tokens": draw(st.sampled_from([0, 1, 3, 8])),
        "enable_prefix_caching": draw(st.booleans()),
        "max_drafts": draw(st.sampled_from([1, 3, 9, 16])),
    }
    return make_limits(**(values | changes))


def planned(plan: StepPlan) -> object:
    """What a plan installs and computes, without drafts and without the numbers of blocks."""
    installs = [(each.row, each.generation, each.request_key) for each in plan.installs]
    rows = [
        (step.row, step.generation, step.start, step.num_tokens - step.drafts, step.samples)
        for step in plan.rows
    ]
    return plan.step_id, installs, rows


@given(limits=tight(), depth=st.integers(1, 3), prompts=PROMPTS)
@few
def test_wrong_drafts_leave_every_plan_as_it_is(
    limits: SchedulerLimits, depth: int, prompts: list[tuple[int, int, int, int]]
) -> None:
    """A row whose drafts are all wrong has a token a step, as without: so has every plan."""

    def plans(max_drafts: int) -> list[object]:
        simulation = Simulation(make_limits(**(changes | {"max_drafts": max_drafts})), depth)
        simulation.worker.random = Wrong()
        for key, (prompt, most, priority, steps) in enumerate(prompts):
            request = make_request(key, prompt, most, ends=False, priority=priority)
            if fits(limits, request):
                simulation.add(request)
            for _ in range(steps):
                simulation.step()
        simulation.drain()
        return [planned(plan) for plan in simulation.plans]

    changes = {name: getattr(limits, name) for name in limits.__struct_fields__}
    assert plans(limits.max_drafts) == plans(0)


def fits(limits: SchedulerLimits, request: Request) -> bool:
    total = len(request.prompt_token_ids) + request.max_tokens
    return limits.blocks_held(total - 1) <= limits.num_blocks


@given(
    limits=tight(
        windows=(None,), enable_prefix_caching=False, max_num_batched_tokens=64,
        max_mixed_prefill_tokens=None, policy="fcfs",
    ),
    longest=st.sampled_from([48, 4096]),
    depth=st.integers(1, 3),
    prompts=PROMPTS,
    seed=st.integers(0, 9),
)  # fmt: skip
@thorough
def test_the_first_in_line_comes_in_as_soon_as_tokens_leave_room(
    limits: SchedulerLimits,
    longest: int,
    depth: int,
    prompts: list[tuple[int, int, int, int]],
    seed: int,
) -> None:
    """However many drafts are right: beside rows of as many tokens it would come in without.

    Such rows need blocks for what is certain of them and for the look-ahead. Where drafts were
    lent more, the steps in flight that have them count too.
    """
    changes = {name: getattr(limits, name) for name in limits.__struct_fields__}
    limits = make_limits(**(changes | {"max_model_len": longest}))
    simulation = Simulation(limits, depth)
    simulation.worker.random = random.Random(seed)
    scheduler, size = simulation.scheduler, limits.block_size

    def needed(known: int, state: RequestState) -> int:
        return blocks_for(min(known + limits.lookahead_tokens, state.max_kv_tokens), size)

    def launch() -> StepPlan | None:
        allocator = scheduler._allocator
        waiting = [state for state in scheduler.states if state.phase is Phase.WAITING]
        head = min(waiting, key=lambda state: state.rank, default=None)
        rows = allocator.rows.num_free
        had, preemptions = set(map(id, allocator.running)), scheduler.stats.preemptions
        plan = simulation.launch()
        if plan is None or head is None or not rows or head.phase is Phase.RUNNING:
            return plan
        if scheduler.stats.preemptions > preemptions:
            # What was taken from one is for others of this step.
            return plan
        taken = 0
        for state in allocator.running:
            blocks = needed(state.target - state.slack, state)
            if longest == 48 and state.slack and id(state) in had:
                blocks = max(blocks, len(state.block_ids[0]))
            taken += blocks
        taken += sum(len(state.block_ids[0]) for state in allocator.leaving)
        free = limits.num_blocks - taken
        assert needed(len(head.token_ids), head) > free, "it waits for blocks that drafts have"
        return plan

    for key, (prompt, most, _, steps) in enumerate(prompts):
        request = make_request(key, prompt, most)
        if fits(limits, request):
            simulation.add(request)
        for _ in range(steps):
            while launch() is not None:
                pass
            simulation.commit()
    while scheduler.has_work:
        while launch() is not None:
            pass
        simulation.commit()


@pytest.mark.parametrize("windows", [(None, 3), (None, Chunk(4)), (1, None, 5)])
def test_blocks_that_were_lent_are_given_back_by_all_groups_alike(
    windows: tuple[int | Chunk | None, ...],
) -> None:
    """A group that is longer than the others is of no use, and its row has drafts nowhere."""
    taken = 0
    for seed in range(60):
        chance = random.Random(seed)
        size = chance.choice([1, 2, 3])
        longest = len(windows) * -(-48 // size)
        limits = make_limits(
            max_num_seqs=5,
            max_num_batched_tokens=chance.choice([16, 64]),
            block_size=size,
            windows=windows,
            num_blocks=chance.choice([longest * 3 // 2, longest * 2, longest * 3]),
            max_model_len=48,
            lookahead_tokens=chance.choice([0, 1, 3, 8]),
            max_drafts=chance.choice([5, 16]),
        )
        simulation = Simulation(limits, chance.randint(1, 3))
        simulation.worker.chance = random.Random(seed)
        for key in range(24):
            prompt = [chance.choice([1, 2]) for _ in range(chance.randint(1, 12))]
            simulation.add(make_request(key, prompt, chance.randint(1, 24)))
            for _ in range(chance.randint(1, 6)):
                # Each looks at all tables.
                simulation.step()
                taken += len(simulation.scheduler._allocator.borrowers)
        simulation.drain()
    assert taken
