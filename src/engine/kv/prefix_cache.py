"""The prefix cache: finds the blocks that hold the KV of a known prefix.

The KV of a block depends on its own tokens and on all tokens before it. So a block is identified by
a chain of hashes: ``digest(i) = sha256(digest(i - 1) + tokens of block i + its media)``. The root
of the chain contains everything else that the KV depends on, and the cache salt. The hash is sha256
and not a faster one, because clients share this table: whoever could construct a collision would
read another client's context.

Each group of layers has its own blocks, so a block's name is a digest and a group. Layers with full
attention need all blocks of a prefix. Layers with a sliding window need the last few, and layers
that attend within chunks those since the last chunk began. A prefix counts as cached up to the
length at which every group has the blocks that it needs.

Source of the scheme: vLLM's automatic prefix caching (docs.vllm.ai, "Automatic Prefix Caching").
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final

from src.core.blocks import Chunk, Window, first_seen
from src.engine.kv.block_pool import BlockPool, InvariantError

# The latest evictions that are remembered to correct matches. A match that missed more starts over.
_MAX_REMEMBERED: Final = 4096


@lru_cache(256)  # nearly all requests have the same
def chain_root(content_key: str, layout: str, salt: str, adapter: bytes = b"") -> bytes:
    """The root of a sequence's digests. Sequences with different roots never share KV.

    Parameters
    ----------
    content_key
        Identifies the model.
    layout
        Block size and groups of layers, see ``SchedulerLimits.layout``.
    salt
        The request's cache salt.
    adapter
        Digest of adapter weights that this sequence uses, or empty.
    """
    parts = (content_key.encode(), layout.encode(), salt.encode(), adapter)
    # Lengths are included, or the end of one part could be taken for the start of the next.
    told = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hashlib.sha256(b"slipstream-kv\0" + told).digest()


class HashChain:
    """The digests of one sequence's full blocks, each computed once and on demand.

    A sequence only grows at its end, so a digest never changes, not even by preemption.

    Parameters
    ----------
    root
        From :func:`chain_root`.
    media
        Block index -> digest of the media in it, which its KV depends on besides its tokens.
    """

    __slots__ = ("_block_size", "_digests", "_media", "_num_shared", "_root", "_trunk")

    def __init__(
        self, block_size: int, root: bytes, media: Mapping[int, bytes] | None = None
    ) -> None:
        self._block_size = block_size
        self._root = root
        self._media = media or None
        # Digests of the blocks from index ``_num_shared`` on. Those before are in the trunk.
        self._digests: list[bytes] = []
        self._trunk: HashChain | None = None
        self._num_shared = 0

    def branch(self, num_tokens: int) -> HashChain:
        """A chain for another sequence that shares its first ``num_tokens`` tokens with this."""
        branch = HashChain(self._block_size, self._root, self._media)
        branch._trunk = self
        branch._num_shared = num_tokens // self._block_size
        return branch

    def digest(self, index: int, token_ids: Sequence[int]) -> bytes:
        """The digest of full block ``index`` of the sequence ``token_ids``."""
        if index < self._num_shared:
            assert self._trunk is not None
            return self._trunk.digest(index, token_ids)
        digests, num_shared = self._digests, self._num_shared
        while (number := num_shared + len(digests)) <= index:
            start = number * self._block_size
            tokens = array("q", token_ids[start : start + self._block_size])
            if len(tokens) < self._block_size:
                raise InvariantError(f"block {number} is not full: it has no digest yet")
            if digests:
                parent = digests[-1]
            else:
                parent = self.digest(number - 1, token_ids) if number else self._root
            content = parent + tokens.tobytes()
            if self._media is not None:
                # The tokens before it have a fixed length, so the media digest is unambiguous.
                content += self._media.get(number, b"")
            digests.append(hashlib.sha256(content).digest())
        return digests[index - num_shared]


class Match:
    """The longest cached prefix of one sequence, kept and updated between lookups.

    Attributes
    ----------
    length
        Number of blocks up to which every group of layers has what it needs.
    evictions
        The cache's eviction count at the last update.
    """

    __slots__ = ("_counted_at", "_num_held", "_runs", "evictions", "length")

    def __init__(self, num_groups: int = 1) -> None:
        self.length = 0
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
    enabled
        If false, callers register nothing, so nothing is ever found.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Sequence[Window] = (None,),
        enabled: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
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
        """Update a match to what :meth:`match` would find now.

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
        if self._windows:
            length = self._agree(length, chain, token_ids)
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

    def _forget(self, block: int) -> None:
        digest, group = self._digest_of[block], self._group_of[block]
        if digest is None:
            raise InvariantError(f"cached block {block} has no digest")
        self._digest_of[block] = None
        del self._block_of[group][digest]
        self._num_evictions += 1
        self._evicted.append((group, self._index_of[block], block))
