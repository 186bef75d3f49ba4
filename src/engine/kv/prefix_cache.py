"""The prefix cache: finds the blocks that hold the KV of a known prefix.

A block's content is identified by a digest (``hash_chain.py``). Each group of layers has its own
blocks, so a block's name is a digest and a group. Layers with full attention need all blocks of a
prefix. Layers with a sliding window need the last few, and layers that attend within chunks those
since the last chunk began. Layers with a recurrent state need a snapshot of it
(``state_cache.py``). A prefix counts as cached up to the length at which every group has what it
needs.

Source of the scheme: vLLM's automatic prefix caching (docs.vllm.ai, "Automatic Prefix Caching").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from src.core.blocks import Chunk, Window, first_seen
from src.engine.kv.block_pool import BlockPool, InvariantError
from src.engine.kv.hash_chain import HashChain
from src.engine.kv.state_cache import StateCache

# The latest evictions that are remembered to correct matches. A match that missed more starts over.
_MAX_REMEMBERED: Final = 4096


class Match:
    """The longest cached prefix of one sequence, kept and updated between lookups.

    Attributes
    ----------
    length
        Number of blocks up to which every group of layers has what it needs.
    reach
        The same without recurrent states: the blocks are there, but perhaps no snapshot.
    evictions
        The cache's eviction count at the last update.
    """

    __slots__ = ("_counted_at", "_num_held", "_runs", "evictions", "length", "reach")

    def __init__(self, num_groups: int = 1) -> None:
        self.length = 0
        self.reach = 0
        self.evictions = 0
        # Per group with full attention: its cached blocks from the start, perhaps more than
        # ``length``. Per group with a window: the cached blocks in the window before the end.
        self._runs: list[list[int]] = [[] for _ in range(num_groups)]
        # The pool's ``num_shifts`` when held blocks were last counted; -1: they must be recounted.
        self._counted_at = -1
        self._num_held = 0

    def run(self, group: int) -> list[int]:
        """The cached blocks of a group, perhaps more than ``length``."""
        return self._runs[group]

    def blocks(self, group: int = 0) -> list[int]:
        """The blocks of the prefix that a group needs; they are not shared yet."""
        run = self._runs[group]
        return run if len(run) <= self.length else run[: self.length]

    @property
    def is_begun(self) -> bool:
        """Whether any group has a cached block."""
        return any(self._runs)

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups together."""
        return sum(min(len(run), self.length) for run in self._runs)

    def cut(self, group: int, length: int) -> None:
        """Keep only the first ``length`` blocks of a group."""
        del self._runs[group][length:]
        self._counted_at = -1

    def forget(self) -> None:
        """Drop all blocks of all groups."""
        for group in range(len(self._runs)):
            self.cut(group, 0)

    def extend(self, group: int, block: int) -> None:
        """Add a group's next block."""
        self._runs[group].append(block)
        self._counted_at = -1

    def recount(self) -> None:
        """Make the next ``num_held`` count again: a block may have been evicted and refilled."""
        self._counted_at = -1

    def settle(self, length: int) -> None:
        """Set the length that all groups agree on."""
        if length != self.length:
            self.length = length
            self._counted_at = -1

    def replace(self, group: int, blocks: list[int]) -> None:
        """Set the cached blocks in a group's window."""
        if self._runs[group] != blocks:
            self._runs[group] = blocks
            self._counted_at = -1

    def num_held(self, pool: BlockPool) -> int:
        """How many of the blocks are held; counted again only if that may have changed."""
        if self._counted_at != pool.num_shifts:
            self._num_held = sum(
                pool.count_held(self.blocks(group)) for group in range(len(self._runs))
            )
            self._counted_at = pool.num_shifts
        return self._num_held


class PrefixCache:
    """Maps the content of full blocks to blocks of one pool.

    Parameters
    ----------
    num_blocks
        Size of the pool, which this creates as ``pool``. A block evicted there is forgotten here.
    block_size
        Tokens per block.
    windows
        Per group of layers: what a query sees.
    num_snapshots
        Slots for recurrent states; ``None``: the model has no such states.
    enabled
        If false, callers register nothing, so nothing is ever found.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Sequence[Window] = (None,),
        num_snapshots: int | None = None,
        enabled: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self.states = None if num_snapshots is None else StateCache(num_snapshots)
        self.enabled = enabled
        # Counts resets. Sequences admitted in an earlier epoch register nothing.
        self.epoch = 0
        self._block_size = block_size
        self._num_groups = len(windows)
        self._full = [group for group, window in enumerate(windows) if window is None]
        # Group with a window or chunks -> its window.
        self._windows = {
            group: window for group, window in enumerate(windows) if window is not None
        }
        self._block_of: list[dict[bytes, int]] = [{} for _ in windows]
        self._digest_of: list[bytes | None] = [None] * num_blocks
        # Of registered blocks: their group, and their index in the sequence.
        self._group_of = [0] * num_blocks
        self._index_of = [0] * num_blocks
        self._num_evictions = 0
        # The latest evictions: (group, index in the sequence, block).
        self._evicted: deque[tuple[int, int, int]] = deque(maxlen=_MAX_REMEMBERED)

    def __len__(self) -> int:
        return sum(map(len, self._block_of))

    def match(self, chain: HashChain, token_ids: Sequence[int]) -> Match:
        """The longest cached prefix of a sequence; its blocks are not shared yet.

        The last token is never part of it, because the next token is sampled from its logits. So
        it has at most ``(len(token_ids) - 1) // block_size`` blocks.
        """
        match = Match(self._num_groups)
        self.follow(match, chain, token_ids)
        return match

    def follow(self, match: Match, chain: HashChain, token_ids: Sequence[int]) -> None:
        """Update a match to what `match` would find now.

        For groups with full attention the cost depends on the changes since the last update, not
        on the prefix's length: evictions may have cut the match, registrations may have extended
        it. Windows are searched again from the end, with at most one lookup per block.
        """
        self._cut_evicted(match)
        length = (len(token_ids) - 1) // self._block_size
        for group in self._full:
            known, run = self._block_of[group], match.run(group)
            if known:
                for index in range(len(run), length):
                    found = known.get(chain.digest(index, token_ids))
                    if found is None:
                        break
                    match.extend(group, found)
            length = min(length, len(run))
        match.reach = length = self._agree(length, chain, token_ids)
        if self.states is not None:
            length = self._agree_with_states(length, chain, token_ids)
        if self._windows:
            for group, window in self._windows.items():
                known = self._block_of[group]
                places = range(self._first_needed(length, window), length)
                match.replace(group, [known[chain.digest(i, token_ids)] for i in places])
        match.settle(length)

    def _cut_evicted(self, match: Match) -> None:
        missed = self._num_evictions - match.evictions
        match.evictions = self._num_evictions
        if missed > len(self._evicted):
            match.forget()
        elif missed and match.is_begun:
            match.recount()
            for group, index, block in islice(reversed(self._evicted), missed):
                run = match.run(group)
                # Windows are searched again anyway.
                if group not in self._windows and index < len(run) and run[index] == block:
                    match.cut(group, index)

    def _agree(self, length: int, chain: HashChain, token_ids: Sequence[int]) -> int:
        """The longest prefix, up to ``length`` blocks, for which every window is cached.

        A group with full attention that has a prefix also has every shorter one. A window group
        may not: so when one group shortens the prefix, all window groups are asked again.
        """
        while True:
            before = length
            for group, window in self._windows.items():
                known, first = self._block_of[group], length
                if not known and isinstance(window, int) and window > 1:
                    return 0
                while first > self._first_needed(length, window):
                    first -= 1
                    if chain.digest(first, token_ids) not in known:
                        length = first
            if length == before:
                return length

    def _first_needed(self, length: int, window: int | Chunk) -> int:
        """The first block, of a prefix of ``length`` blocks, that the token behind it sees."""
        return min(length, first_seen(length * self._block_size, window) // self._block_size)

    def _agree_with_states(self, length: int, chain: HashChain, token_ids: Sequence[int]) -> int:
        """The longest prefix, up to ``length`` blocks, that has a snapshot and every window."""
        assert self.states is not None
        while True:
            latest = self.states.latest(length, chain, token_ids)
            length = self._agree(latest, chain, token_ids)
            if length == latest:
                return length

    def register(self, digest: bytes, block: int, index: int, group: int = 0) -> bool:
        """Register a held block, whose KV is committed, under its digest; returns whether it was.

        ``index`` is the block's index in its sequence.

        If another block has this digest already, the new one is not registered and becomes free
        with its last holder. Block tables are never rewritten while a step may read them.
        """
        known = self._block_of[group]
        if digest in known:
            return False
        known[digest] = block
        self._digest_of[block] = digest
        self._group_of[block] = group
        self._index_of[block] = index
        self.pool.keep(block)
        return True

    def reset(self) -> None:
        """Forget all cached content, also that of running requests."""
        self.epoch += 1
        for known in self._block_of:
            known.clear()
        self._digest_of = [None] * self.pool.num_blocks
        # The count exceeds the remembered evictions, so every match starts over.
        self._evicted.clear()
        self._num_evictions += 1
        self.pool.forget()
        if self.states is not None:
            self.states.reset()

    def _forget(self, block: int) -> None:
        digest, group = self._digest_of[block], self._group_of[block]
        if digest is None:
            raise InvariantError(f"cached block {block} has no digest")
        self._digest_of[block] = None
        del self._block_of[group][digest]
        self._num_evictions += 1
        self._evicted.append((group, self._index_of[block], block))
