from __future__ import annotations

import pytest

from src.core.blocks import blocks_for
from src.engine.kv.block_pool import BlockPool, InvariantError


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks


def test_released_blocks_without_content_are_used_before_cached_ones() -> None:
    pool = BlockPool(4)
    table = pool.allocate(4)
    pool.keep(table[0])
    pool.keep(table[1])
    pool.release(table)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (4, 2, 0)
    assert set(pool.allocate(2)) == {table[2], table[3]}


def test_eviction_takes_the_least_recently_used_and_a_tail_before_its_head() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    old, new = pool.allocate(2), pool.allocate(2)
    for block in (*old, *new):
        pool.keep(block)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(4) == evicted == [old[1], old[0], new[1], new[0]]


def test_a_shared_block_is_free_only_when_its_last_holder_leaves() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.keep(block)
    pool.share([block])
    pool.release([block])
    assert pool.is_held(block)
    pool.release([block])
    assert not pool.is_held(block)
    pool.share([block])  # a hit takes it out of the LRU
    assert (pool.num_cached, pool.num_held, pool.num_free) == (0, 1, 1)
    pool.check([[block]])


def test_a_reused_block_does_not_inherit_that_its_content_was_worth_keeping() -> None:
    pool = BlockPool(1)
    for _ in range(2):
        [block] = pool.allocate(1)
        pool.keep(block)
        pool.release([block])
    pool.release(pool.allocate(1))
    assert pool.num_cached == 0


def test_forgotten_content_makes_free_blocks() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block in table:
        pool.keep(block)
    pool.release(table[1:])
    pool.forget()
    assert (pool.num_cached, pool.num_free) == (0, 2)
    pool.release(table[:1])
    assert (pool.num_cached, pool.num_free) == (0, 3)
    pool.check([])


def test_whether_releasing_tables_frees_a_block() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    for block in table:
        pool.keep(block)
    pool.share(table)
    assert not pool.frees_some([table])
    assert pool.frees_some([table, table])
    assert not pool.frees_some([])
    assert pool.frees_some([table, pool.allocate(1)])


def test_misuse_is_an_invariant_error() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    with pytest.raises(InvariantError, match="2 blocks asked for, 1 are free"):
        pool.allocate(2)
    with pytest.raises(InvariantError, match="cannot be shared"):
        pool.share([1 - table[0]])
    with pytest.raises(InvariantError, match="nobody holds it"):
        pool.keep(1 - table[0])
    pool.release(table)
    with pytest.raises(InvariantError, match="nobody holds it"):
        pool.release(table)


def test_check_finds_a_leak_and_a_theft() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.check([table])
    with pytest.raises(InvariantError, match=r"1 references, 0 tables"):
        pool.check([])
    with pytest.raises(InvariantError, match=r"1 references, 2 tables"):
        pool.check([table, table[:1]])
