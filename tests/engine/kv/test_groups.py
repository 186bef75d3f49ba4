"""Several groups of layers over one pool: what a row holds, and which prefix all of them know."""

from __future__ import annotations

import random

import pytest

from src.core.blocks import Chunk, Window, blocks_held
from src.core.errors import PromptTooLongError
from src.engine.kv.hash_chain import HashChain, chain_root
from src.engine.kv.prefix_cache import Match, PrefixCache
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request

TOKENS = list(range(100, 140))


def chain_of() -> HashChain:
    return HashChain(2, chain_root("model", "layout", ""))


def fill(cache: PrefixCache, groups: int, num_blocks: int) -> list[list[int]]:
    """Compute the first blocks of `TOKENS` in every group, and let go of them."""
    chain = chain_of()
    tables = [cache.pool.allocate(num_blocks) for _ in range(groups)]
    for index in range(num_blocks):
        for group in range(groups):
            cache.register(chain.digest(index, TOKENS), tables[group][index], index, group)
    return tables


def evict(cache: PrefixCache, *blocks: int) -> None:
    """Have these given to somebody else; all others are held."""
    cache.pool.release(blocks)
    cache.pool.allocate(len(blocks))


@pytest.mark.parametrize(
    ("num_tokens", "window", "blocks"),
    [(40, None, 10), (40, 1, 1), (40, 2, 2), (40, 5, 2), (40, 6, 3), (40, 9, 3), (3, 9, 1)],
)
def test_what_a_window_spans(num_tokens: int, window: int | None, blocks: int) -> None:
    assert blocks_held(num_tokens, 4, window) == blocks
    if window is not None and num_tokens > window:
        # Whatever tokens see: from the block of the first to the block of the last.
        spans = [last // 4 - (last - window + 1) // 4 + 1 for last in range(window, num_tokens)]
        assert max(spans) == blocks


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [1, 8])
@pytest.mark.parametrize("length", [100, 1000])
def test_a_row_holds_no_more_of_a_longer_context(length: int, budget: int, depth: int) -> None:
    window, size = 9, 4
    limits = make_limits(
        max_num_batched_tokens=budget, block_size=size, num_blocks=64, windows=(window,),
        max_model_len=2000, enable_prefix_caching=False,
    )  # fmt: skip
    simulation = Simulation(limits, depth)
    simulation.add(make_request(0, length, 8, ends=False))
    most = 0
    while simulation.scheduler.has_work:
        while simulation.launch() is not None:
            most = max(most, simulation.scheduler.pool.num_held)
        simulation.commit()
    # The window, and what is in flight of a prompt: with one token at a time, one block more than
    # the two that the 8 tokens before it fill.
    assert most <= -(-(window - 1 + depth * budget) // size) + 1
    assert budget > 1 or depth > 1 or most == 3
    simulation.scheduler.check_idle()


def test_blocks_of_past_chunks_are_given_back() -> None:
    limits = make_limits(
        block_size=4, num_blocks=64, windows=(None, Chunk(10)), max_model_len=200,
        max_num_batched_tokens=1,
    )  # fmt: skip
    simulation = Simulation(limits)
    simulation.add(make_request(0, 45, 4, ends=False))
    seen = []
    while simulation.scheduler.has_work:
        simulation.launch()
        seen += [state.behind[1] for state in simulation.scheduler._requests.values()]
        simulation.commit()
    # When a block becomes full: those before the chunk that the next token begins or goes on with.
    # Of 40 tokens, the fifth chunk begins with the eleventh block.
    assert sorted(set(seen)) == [0, 2, 5, 7, 10]
    simulation.scheduler.check_idle()


def test_chunks_need_the_blocks_since_they_began() -> None:
    cache = PrefixCache(20, 2, windows=(None, Chunk(8)))
    _, chunked = fill(cache, 2, 10)
    match = cache.match(chain_of(), TOKENS)
    assert match.length == 10
    assert match.blocks(1) == chunked[8:]
    # Within its chunk, a token sees what the chunk began with.
    evict(cache, chunked[8])
    match = cache.match(chain_of(), TOKENS)
    # At a chunk's start it sees nothing before itself.
    assert (match.length, match.blocks(1)) == (8, [])
    evict(cache, *chunked[:7])
    assert cache.match(chain_of(), TOKENS).length == 8


def test_a_pool_of_a_windows_blocks_is_enough_for_any_prompt() -> None:
    limits = make_limits(block_size=4, num_blocks=3, windows=(9,), max_model_len=2000)
    simulation = Simulation(limits, 2)
    for key in range(3):
        simulation.add(make_request(key, 120, 8, ends=False))
    simulation.drain()
    # One block fewer, and it could not go on at the first token that sees three.
    limits = make_limits(block_size=4, num_blocks=2, windows=(9,), max_model_len=2000)
    with pytest.raises(PromptTooLongError, match="3 blocks of KV memory"):
        Simulation(limits).add(make_request(0, 300, 50, ends=False))


def test_tables_of_a_group_that_sees_everything_are_whole_at_admission() -> None:
    limits = make_limits(num_blocks=64, windows=(None, 3), max_num_batched_tokens=4)
    simulation = Simulation(limits)
    simulation.add(make_request(0, 12, 4, ends=False))
    plan = simulation.launch()
    assert plan is not None
    assert [len(table) for table in plan.installs[0].block_ids] == [6, 0]
    assert [(a.group, a.index, len(a.block_ids)) for a in plan.block_appends] == [(1, 0, 2)]
    simulation.commit()
    plan = simulation.launch()
    assert plan is not None
    # Position 4 sees 2 and 3: the first block was given back, and is the next one.
    assert simulation.scheduler._requests[0].behind == [0, 1]
    assert [(a.group, a.index, len(a.block_ids)) for a in plan.block_appends] == [(1, 2, 2)]
    simulation.drain()


def test_windows_need_their_last_blocks_of_a_prefix_only() -> None:
    cache = PrefixCache(20, 2, windows=(None, 4))
    full, windowed = fill(cache, 2, 10)
    match = cache.match(chain_of(), TOKENS)
    assert (match.length, match.num_blocks) == (10, 12)
    assert match.blocks(0) == full
    assert match.blocks(1) == windowed[8:]
    evict(cache, *windowed[:8])
    assert cache.match(chain_of(), TOKENS).length == 10
    # Without its ninth block, and with neither of the eight before, no end is left.
    evict(cache, windowed[8])
    assert cache.match(chain_of(), TOKENS).length == 0


def test_groups_agree_on_what_the_shortest_knows() -> None:
    cache = PrefixCache(30, 2, windows=(4, None, 6))
    first, full, last = fill(cache, 3, 10)
    evict(cache, full[9])
    assert cache.match(chain_of(), TOKENS).length == 9
    # The first window ends at 5 then, where the last one has a gap: they go back to 3, and there
    # the first one has another.
    evict(cache, first[7], first[8], first[5])
    evict(cache, last[3])
    assert cache.match(chain_of(), TOKENS).length == 3
    evict(cache, first[1])
    match = cache.match(chain_of(), TOKENS)
    assert match.length == 1
    assert [match.blocks(group) for group in range(3)] == [first[:1], full[:1], last[:1]]


def first_block(length: int, window: Window) -> int:
    """The first of so many blocks of two tokens that the next token sees."""
    if isinstance(window, Chunk):
        seen = [p for p in range(2 * length) if p // window.size == 2 * length // window.size]
        return seen[0] // 2 if seen else length
    return 0 if window is None else max(0, length - window // 2)


@pytest.mark.parametrize(
    "windows",
    [
        *[(None, None), (None, 3), (5,), (3, None, 7), (1, None)],
        *[(Chunk(4), None), (Chunk(5),), (Chunk(3), None, 7, Chunk(1))],
    ],
)
def test_a_followed_match_is_what_a_new_look_finds(windows: tuple[Window, ...]) -> None:
    rng = random.Random(0)
    groups = len(windows)
    cache = PrefixCache(14 * groups, 2, windows=windows)
    sequences = [[5, 6, 7, 8] * 3 + [i % 3, i % 2, i, 9] * 2 for i in range(6)]
    followed = [(sequence, chain_of(), Match(groups)) for sequence in sequences]
    held: list[list[int]] = []
    lengths = set()
    for _ in range(600):
        match rng.randrange(4):
            case 0 | 1:
                # A table somewhere in a sequence, of any group.
                tokens, group, first = rng.choice(sequences), rng.randrange(groups), 0
                count = rng.randint(1, 10)
                first = rng.randrange(count)
                if count - first <= cache.pool.num_free:
                    table = cache.pool.allocate(count - first)
                    for index, block in enumerate(table, first):
                        cache.register(chain_of().digest(index, tokens), block, index, group)
                    held.append(table)
            case 2 if held:
                cache.pool.release(held.pop(rng.randrange(len(held))))
            case 3 if cache.pool.num_free:
                held.append(cache.pool.allocate(1))
        if rng.random() < 0.01:
            cache.reset()
        for sequence, chain, match_ in rng.sample(followed, 3):
            cache.follow(match_, chain, sequence)
            fresh = cache.match(chain_of(), sequence)
            assert match_.length == fresh.length
            hits = [match_.blocks(group) for group in range(groups)]
            assert hits == [fresh.blocks(group) for group in range(groups)]
            assert match_.num_held(cache.pool) == sum(
                map(cache.pool.is_held, [block for blocks in hits for block in blocks])
            )
            assert match_.num_blocks == sum(map(len, hits))
            lengths.add(match_.length)
            # By the rule itself: the longest prefix of which each group knows what it sees.
            known = cache._block_of
            digests = [chain.digest(i, sequence) for i in range((len(sequence) - 1) // 2)]
            fitting = [
                length
                for length in range(len(digests) + 1)
                if all(
                    set(digests[first_block(length, w) : length]) <= known[group].keys()
                    for group, w in enumerate(windows)
                )
            ]
            assert match_.length == max(fitting)
    assert len(lengths) > 3


def test_shared_windows_are_given_back_once_for_each_holder() -> None:
    limits = make_limits(num_blocks=40, windows=(None, 4), max_num_batched_tokens=16)
    simulation = Simulation(limits, 2)
    prompt = TOKENS[:17]
    simulation.add(make_request(0, prompt, 6, ends=False))
    simulation.step()
    simulation.drain()
    for key in (1, 2, 3):
        simulation.add(make_request(key, [*prompt, key], 6, ends=False))
    simulation.drain()
    cached = [simulation.first_events[key].cached_tokens for key in (1, 2, 3)]
    assert cached == [16, 16, 16]


def test_names_tell_models_layouts_salts_and_adapters_apart() -> None:
    given = [
        ("", "", "", b""), ("a", "", "", b""), ("", "a", "", b""), ("", "", "a", b""),
        ("", "", "", b"a"), ("ab", "", "", b""), ("a", "b", "", b""), ("", "ab", "", b""),
    ]  # fmt: skip
    roots = {chain_root(*each) for each in given}
    assert len(roots) == len(given)
    digests = {HashChain(2, root).digest(0, TOKENS) for root in roots}
    assert len(digests) == len(given)


def test_media_are_part_of_the_names_from_their_block_on() -> None:
    root = chain_root("model", "layout", "")
    plain, cat = HashChain(2, root), HashChain(2, root, {3: b"cat at 0"})
    dog = HashChain(2, root, {3: b"dog at 0"})
    assert plain.digest(2, TOKENS) == cat.digest(2, TOKENS) == dog.digest(2, TOKENS)
    for index in (3, 4, 9):
        names = {chain.digest(index, TOKENS) for chain in (plain, cat, dog)}
        assert len(names) == 3
    branch = cat.branch(9)
    assert [branch.digest(i, TOKENS) for i in range(6)] == [cat.digest(i, TOKENS) for i in range(6)]


def test_other_media_are_neither_found_nor_waited_for() -> None:
    simulation = Simulation(make_limits(num_blocks=64, max_num_batched_tokens=32))
    for key, media in enumerate(({1: b"cat"}, {1: b"dog"}, {1: b"cat"})):
        request = make_request(key, TOKENS[:12], 2, ends=False, media_keys=media)
        simulation.add(request)
    plan = simulation.launch()
    assert plan is not None
    # The last waits for the first; the second has another image in its second block.
    assert [install.request_key for install in plan.installs] == [0, 1]
    simulation.drain()
    cached = [simulation.first_events[key].cached_tokens for key in range(3)]
    assert cached == [0, 0, 10]
