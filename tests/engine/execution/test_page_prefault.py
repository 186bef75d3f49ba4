"""KV memory is taken before it is needed, while nothing is computed, and no more than that."""

from __future__ import annotations

import asyncio
import mmap
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from src import AsyncEngine, SamplingParams
from src.core.plan import BlockAppend, RowInstall, StepPlan
from src.engine import startup
from src.engine.execution.kv_cache import KVCache, KVCachePlan, allocate_kv_cache
from src.engine.execution.page_prefault import PagePrefault
from src.models import keys_and_values
from src.ops.host_memory import LARGE_PAGE, lazy_zeros, take
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import small_config
from tests.support.probe import Probe

MIB = 2**20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="/proc, and madvise(2)")


def pool(num_blocks: int, heads: tuple[int, ...] = (2, 2)) -> KVCache:
    """A block is 4 KiB of keys per head, and as much of values."""
    layers = [keys_and_values(count, 128, torch.bfloat16, None) for count in heads]
    return allocate_kv_cache(
        layers, KVCachePlan(16, num_blocks, 2 * 4096 * sum(heads)), torch.device("cpu")
    )


def step_that_uses(*blocks: int, appended: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(
        1,
        [RowInstall(0, 1, 7, [1, 2], 2, [list(blocks)])],
        [BlockAppend(0, 0, 1, list(appended))] if appended else [],
        [],
    )


class Taken:
    """Instead of the system."""

    def __init__(self, gives: bool = True) -> None:
        self.gives = gives
        self.pieces: list[tuple[int, int]] = []

    def __call__(self, tensor: Tensor, start: int, size: int) -> bool:
        assert start % LARGE_PAGE == 0
        assert start < tensor.nbytes
        self.pieces.append((tensor.data_ptr(), start))
        return self.gives

    def bytes_of(self, tensor: Tensor) -> int:
        """How far it is taken from its begin."""
        mine = sorted(start for pointer, start in self.pieces if pointer == tensor.data_ptr())
        assert len(set(mine)) == len(mine), "a page was taken twice"
        return min(tensor.nbytes, mine[-1] + LARGE_PAGE) if mine else 0


def finish(memory: PagePrefault) -> None:
    while not memory.is_complete:
        memory.take_next()


@given(
    st.integers(1, 3000),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(0, 20 * MIB),
    st.lists(st.integers(0, 2999), max_size=5),
)
def test_every_layer_is_taken_as_far_as_is_wanted_and_no_further(
    num_blocks: int, heads: list[int], ahead: int, used: list[int]
) -> None:
    cache, taken = pool(num_blocks, tuple(heads)), Taken()
    memory = PagePrefault(cache, ahead, taken)
    most = 0
    for block in (0, *used):
        block = min(block, num_blocks - 1)
        memory.follow(step_that_uses(block))
        most = max(most, block + 1)
        finish(memory)
    wanted = min(num_blocks, most + max(1, ahead // cache.plan.bytes_per_block))
    for tensor in cache.named().values():
        if tensor.nbytes < LARGE_PAGE:
            assert taken.bytes_of(tensor) == 0
            continue
        per_block = tensor.nbytes // num_blocks
        assert wanted * per_block <= taken.bytes_of(tensor)
        assert taken.bytes_of(tensor) < wanted * per_block + LARGE_PAGE


def test_what_steps_have_touched_is_passed_over() -> None:
    cache, taken = pool(4096), Taken()
    memory = PagePrefault(cache, MIB, taken)
    memory.follow(step_that_uses(0, appended=(2000, 1)))
    finish(memory)
    assert min(start for _, start in taken.pieces) == 2001 * 8192 // LARGE_PAGE * LARGE_PAGE


def test_a_system_that_cannot_is_asked_once() -> None:
    taken = Taken(gives=False)
    memory = PagePrefault(pool(4096), 64 * MIB, taken)
    assert not memory.is_complete
    finish(memory)
    memory.follow(step_that_uses(4000))
    assert memory.is_complete
    assert len(taken.pieces) == 1


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def resident_at(addresses: list[int]) -> int:
    """Bytes of the mappings with these addresses that are in memory."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(number, 16) for number in match.groups())
            counts = any(begin <= address < end for address in addresses)
        elif counts and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@linux_only
def test_pages_are_taken_with_what_they_hold() -> None:
    tensor = lazy_zeros((16 * MIB,), torch.uint8)
    tensor[5 * MIB + 3] = 7
    before = resident()
    assert take(tensor, 4 * MIB, 8 * MIB)
    assert 4 * MIB <= resident() - before <= 10 * MIB
    assert int(tensor.sum()) == int(tensor[5 * MIB + 3]) == 7
    # As much as there is.
    assert take(tensor, 14 * MIB, 8 * MIB)


@pytest.mark.anyio
@linux_only
async def test_an_engine_takes_memory_in_its_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not as in the other tests, where all of it is written to.
    monkeypatch.setattr(startup, "allocate_kv_cache", allocate_kv_cache)
    path = make_checkpoint(tmp_path, tokenizer=True)
    config = small_config(path, cache__memory_bytes=2**30, cache__block_size=16)
    async with AsyncEngine.open(config) as engine:
        cache = Probe(engine).kv_cache
        places = [tensor.data_ptr() for tensor in cache.named().values()]
        # Without any request, and no further.
        deadline = time.monotonic() + 60
        while resident_at(places) < 250 * MIB and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        assert 250 * MIB <= resident_at(places) <= 300 * MIB
        # What is used moves it on: 16 requests of 200 tokens that share nothing.
        prompts = [[3 + (number * 7 + first) % 300 for number in range(200)] for first in range(16)]
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        used = 16 * 200 // cache.plan.block_size * cache.plan.bytes_per_block
        deadline = time.monotonic() + 60
        while resident_at(places) < 256 * MIB + used and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert 256 * MIB + used <= resident_at(places) <= 310 * MIB + used
