"""Recurrent states in the pure half: when they are copied, who finds the copies, who loses them."""

from __future__ import annotations

import pytest

from src.core.errors import ConfigError
from src.core.plan import StepPlan
from src.engine.kv.block_pool import InvariantError
from src.engine.kv.hash_chain import HashChain, chain_root
from src.engine.kv.prefix_cache import PrefixCache
from src.engine.kv.state_cache import StateCache
from src.engine.scheduling.replay import plan_line
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request

TOKENS = list(range(100, 120))
CHAIN = HashChain(2, chain_root("model", "layout", ""))
DIGESTS = [CHAIN.digest(index, TOKENS) for index in range(10)]


def simulation(**changes: object) -> Simulation:
    settings = {"num_snapshots": 8, "snapshot_interval": 100, "num_blocks": 60}
    return Simulation(make_limits(**(settings | changes)))


def ends_of(plans: list[StepPlan], row: int = 0) -> list[int]:
    return [s.start + s.num_tokens for plan in plans for s in plan.rows if s.row == row]


def saved_at(plans: list[StepPlan]) -> list[int]:
    """Positions at which states were copied."""
    ends = [{s.row: s.start + s.num_tokens for s in plan.rows} for plan in plans]
    return [at[save.row] for plan, at in zip(plans, ends, strict=True) for save in plan.state_saves]


def run(sim: Simulation, key: int, prompt: list[int], max_tokens: int = 1) -> list[StepPlan]:
    """Run a request alone; its plans."""
    before = len(sim.plans)
    sim.add(make_request(key, prompt, max_tokens, ends=False))
    sim.drain()
    return sim.plans[before:]


def test_the_longest_prefix_with_a_snapshot_is_found() -> None:
    states = StateCache(4)
    assert states.latest(10, CHAIN, TOKENS) == 0
    for length in (2, 5):
        slot = states.take()
        assert slot is not None
        states.register(DIGESTS[length - 1], slot, length)
    # Fewer snapshots than blocks, and the other way round.
    for length, found in ((10, 5), (5, 5), (4, 2), (2, 2), (1, 0), (0, 0)):
        assert states.latest(length, CHAIN, TOKENS) == found
    other = [*TOKENS[:6], *[7] * 14]
    assert states.latest(10, HashChain(2, chain_root("model", "layout", "")), other) == 2
    states.check([])


def test_the_slot_that_was_not_used_for_longest_is_taken() -> None:
    states = StateCache(2)
    slots = [states.take(), states.take()]
    assert states.take() is None
    for index, slot in enumerate(slots):
        assert slot is not None
        states.register(DIGESTS[index], slot, index + 1)
    assert states.use(DIGESTS[0]) == slots[0]
    assert states.take() == slots[1]
    assert DIGESTS[0] in states
    assert DIGESTS[1] not in states
    with pytest.raises(InvariantError):
        states.check([])
    states.check([slots[1] or 0])


def test_a_second_copy_of_a_prefix_is_given_up() -> None:
    states = StateCache(2)
    for _ in range(2):
        slot = states.take()
        assert slot is not None
        states.register(DIGESTS[0], slot, 1)
    assert len(states) == 1
    assert states.pool.num_free == 2
    states.reset()
    assert not len(states)
    states.check([])


def test_every_group_has_what_a_hit_needs() -> None:
    """Full attention first, then windows, then a snapshot; and windows again."""
    cache = PrefixCache(40, 2, windows=(None, 5), num_snapshots=4)
    assert cache.states is not None
    for group, known in enumerate((range(8), (0, 1, 2, 3, 5, 6, 7))):
        for index in known:
            (block,) = cache.pool.allocate(1)
            cache.register(DIGESTS[index], block, index, group)

    def snapshot(length: int) -> None:
        assert cache.states is not None
        slot = cache.states.take()
        assert slot is not None
        cache.states.register(DIGESTS[length - 1], slot, length)

    match = cache.match(CHAIN, TOKENS)
    assert (match.length, match.reach) == (0, 8)
    snapshot(3)
    assert cache.match(CHAIN, TOKENS).length == 3
    # Its window lacks block 4, and so does that of 5; 4 is the next one whose window is there.
    snapshot(6)
    assert cache.match(CHAIN, TOKENS).length == 3
    snapshot(4)
    match = cache.match(CHAIN, TOKENS)
    assert (match.length, len(match.blocks(0)), len(match.blocks(1))) == (4, 4, 2)
    cache.follow(match, CHAIN, TOKENS[:7])
    assert match.length == 3
    cache.reset()
    assert cache.match(CHAIN, TOKENS).length == 0


def test_a_prompt_is_cut_where_its_last_full_block_ends() -> None:
    sim = simulation()
    first = run(sim, 0, TOKENS[:13])
    assert ends_of(first) == [8, 12, 13]
    assert saved_at(first) == [12]
    again = run(sim, 1, [*TOKENS[:13], 5, 6, 7])
    assert [len(plan.state_loads) for plan in again] == [1, 0]
    assert again[0].rows[0].start == 12
    assert again[0].state_loads[0].slot == first[1].state_saves[0].slot
    # A conversation that goes on: what it adds gets a copy of its own.
    assert saved_at(again) == [14]


def test_the_last_token_of_whole_blocks_is_computed() -> None:
    sim = simulation()
    assert saved_at(run(sim, 0, TOKENS[:12])) == [10]
    assert run(sim, 1, TOKENS[:12])[0].rows[0].start == 10


def test_copies_are_made_at_intervals_of_prompts_and_outputs() -> None:
    sim = simulation(snapshot_interval=3)
    plans = run(sim, 0, TOKENS[:9], max_tokens=12)
    assert saved_at(plans) == [6, 8, 12, 18]
    assert ends_of(plans)[:3] == [6, 8, 9]


def test_who_shares_a_beginning_leaves_a_copy_where_it_ends() -> None:
    """The second one computes the common part again; the third one need not."""
    sim = simulation()
    run(sim, 0, [*TOKENS[:8], 1, 2, 3, 4, 5])
    second = run(sim, 1, [*TOKENS[:8], 6, 7, 8, 9, 10])
    assert second[0].rows[0].start == 0
    assert saved_at(second) == [8, 12]
    third = run(sim, 2, [*TOKENS[:8], 11, 12, 13])
    assert third[0].rows[0].start == 8


@pytest.mark.parametrize("interruption", ["abort", "fail", "reset"])
def test_copies_of_what_did_not_go_well_have_no_name(interruption: str) -> None:
    sim = simulation(max_num_batched_tokens=16)
    sim.depth = 2
    sim.add(make_request(0, TOKENS[:13], 4, ends=False))
    sim.launch()
    assert sim.plans[0].state_saves
    sim.launch()
    if interruption == "abort":
        sim.finish(0)
    elif interruption == "fail":
        sim.fail_step()
    else:
        sim.scheduler.reset_prefix_cache()
    sim.drain()
    assert len(sim.scheduler._allocator.cache.states or ()) == 0
    assert run(sim, 1, TOKENS[:13])[0].rows[0].start == 0


def test_nobody_waits_for_a_slot() -> None:
    sim = simulation(num_snapshots=1, max_num_seqs=2, max_num_batched_tokens=32)
    for key in range(2):
        sim.add(make_request(key, [*TOKENS[:9], key, key, key], 2, ends=False))
    sim.drain()
    saves = [len(plan.state_saves) for plan in sim.plans]
    assert max(saves) == 1


def test_without_slots_nothing_is_cut_copied_or_found() -> None:
    sim = simulation(num_snapshots=0, max_num_batched_tokens=16)
    for key in range(2):
        plans = run(sim, key, TOKENS[:13])
        assert ends_of(plans) == [13]
        assert not any(plan.state_saves or plan.state_loads for plan in plans)


def test_a_preempted_request_resumes_from_its_copy() -> None:
    sim = simulation(num_blocks=14, max_num_batched_tokens=16, lookahead_tokens=0)
    for key in range(2):
        sim.add(make_request(key, [key * 50 + i for i in range(9)], 12, ends=False))
    sim.drain()
    assert sim.scheduler.stats.preemptions
    loads = [load for plan in sim.plans for load in plan.state_loads]
    assert loads


def test_plans_are_logged_with_their_copies() -> None:
    sim = simulation()
    run(sim, 0, TOKENS[:13])
    run(sim, 1, TOKENS[:13])
    lines = [plan_line(plan) for plan in sim.plans]
    assert [line.state_saves for line in lines if line.state_saves] == [[(0, 0)]]
    assert [line.state_loads for line in lines if line.state_loads] == [[(0, 0)]]


@pytest.mark.parametrize("changes", [{"num_snapshots": -1}, {"snapshot_interval": 0}])
def test_limits_that_make_no_sense_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="num_snapshots"):
        make_limits(**changes)


def test_states_are_part_of_a_blocks_name() -> None:
    assert make_limits().layout != make_limits(num_snapshots=3).layout
