"""The prefix cache: from the content of a prefix to the blocks that hold its last tokens' KV.

The KV of a block depends on its own tokens and on all before them, so a block is named by a chain
of hashes: ``digest(i) = sha256(digest(i - 1) + tokens of block i + its media)``. In the chain's
root is whatever else keys and values depend on, and the cache salt. sha256 rather than a fast hash,
because two clients share this table and a collision that somebody can construct would hand one the
other's context.

Each group of layers has blocks of its own, so a name is a digest and a group. Layers that see the
whole context need all blocks of a prefix, those with a sliding window the last few: how long a
prefix is known is what all groups agree on.

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

from src.core.blocks import blocks_for
from src.engine.kv.block_pool import BlockPool, InvariantError

# Evictions that are remembered, for matches to be corrected by; who missed more starts anew.
_MAX_REMEMBERED: Final = 4096


@lru_cache(256)  # nearly all requests have the same
def chain_root(content_key: str, layout: str, salt: str, adapter: bytes = b"") -> bytes:
    """What the digests of a sequence begin with: equal only where its KV may be shared.

    Parameters
    ----------
    content_key
        Of the model whose keys and values they are.
    layout
        Of blocks: how many tokens, and of which groups of layers.
    salt
        The request's.
    adapter
        Digest of the weights that are added to the model's for this sequence.
    """
    parts = (content_key.encode(), layout.encode(), salt.encode(), adapter)
    # With lengths, or the end of one could be taken for the beginning of the next.
    told = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hashlib.sha256(b"slipstream-kv\0" + told).digest()


class HashChain:
    """The digests of one sequence's full blocks, computed once each and only when asked for.

    A sequence only grows at its end, so a digest never changes; it survives preemption.

    Parameters
    ----------
    root
        Of :func:`chain_root`.
    media
        Block -> what its KV depends on besides its tokens.
    """

    __slots__ = ("_block_size", "_digests", "_media", "_num_shared", "_root", "_trunk")

    def __init__(
        self, block_size: int, root: bytes, media: Mapping[int, bytes] | None = None
    ) -> None:
        self._block_size = block_size
        self._root = root
        self._media = media or None
        # Of the blocks behind the first ``_num_shared``, which are the trunk's.
        self._digests: list[bytes] = []
        self._trunk: HashChain | None = None
        self._num_shared = 0

    def branch(self, num_tokens: int) -> HashChain:
        """The chain of a sequence that has the first ``num_tokens`` tokens in common with this."""
        branch = HashChain(self._block_size, self._root, self._media)
        branch._trunk = self
        branch._num_shared = num_tokens // self._block_size
        return branch

    def digest(self, index: int, token_ids: Sequence[int]) -> bytes:
        """The name of full block ``index`` of the sequence ``token_ids``."""
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
                # Behind tokens of a fixed length, so it cannot be taken for them.
                content += self._media.get(number, b"")
            digests.append(hashlib.sha256(content).digest())
        return digests[index - num_shared]


class Match:
    """The longest known prefix of one sequence, kept from one look to the next.

    Attributes
    ----------
    length
        Its blocks, as far as all groups of layers know it.
    evictions
        The cache's count of evictions that this knows of.
    """

    __slots__ = ("_counted_at", "_num_held", "_runs", "evictions", "length")

    def __init__(self, num_groups: int = 1) -> None:
        self.length = 0
        self.evictions = 0
        # Per group that sees everything, its known run, which may be longer than all agree on; per
        # group with a window, the known blocks in it before the end.
        self._runs: list[list[int]] = [[] for _ in range(num_groups)]
        # When held blocks were counted last, on the pool's clock; -1 since they changed.
        self._counted_at = -1
        self._num_held = 0

    def run(self, group: int) -> list[int]:
        """What is known of a group, to be extended."""
        return self._runs[group]

    def blocks(self, group: int = 0) -> list[int]:
        """The last blocks of the prefix, those that the group needs of it; not shared yet."""
        run = self._runs[group]
        return run if len(run) <= self.length else run[: self.length]

    @property
    def is_begun(self) -> bool:
        """Whether anything is known of any group."""
        return any(self._runs)

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups together."""
        return sum(min(len(run), self.length) for run in self._runs)

    def cut(self, group: int, length: int) -> None:
        """Give up what lies behind the first ``length`` blocks of a group."""
        del self._runs[group][length:]
        self._counted_at = -1

    def forget(self) -> None:
        """Give up everything."""
        for group in range(len(self._runs)):
            self.cut(group, 0)

    def extend(self, group: int, block: int) -> None:
        """Add a group's next block."""
        self._runs[group].append(block)
        self._counted_at = -1

    def recount(self) -> None:
        """Count held blocks anew: one may have lost its content, and have got it again since."""
        self._counted_at = -1

    def settle(self, length: int) -> None:
        """Note what all groups agree on."""
        if length != self.length:
            self.length = length
            self._counted_at = -1

    def replace(self, group: int, blocks: list[int]) -> None:
        """Note the known blocks in a group's window."""
        if self._runs[group] != blocks:
            self._runs[group] = blocks
            self._counted_at = -1

    def num_held(self, pool: BlockPool) -> int:
        """How many of the blocks somebody holds; counted only if that may have changed."""
        if self._counted_at != pool.num_shifts:
            self._num_held = sum(
                pool.count_held(self.blocks(group)) for group in range(len(self._runs))
            )
            self._counted_at = pool.num_shifts
        return self._num_held


class PrefixCache:
    """Full blocks by content, over the blocks of one pool.

    Parameters
    ----------
    num_blocks
        Size of the pool, which this creates as ``pool``: eviction there is forgetting here.
    block_size
        Tokens of a block.
    windows
        Per group of layers, tokens that a query sees, itself included; ``None`` is all.
    enabled
        When false, nothing is ever registered and so nothing found.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Sequence[int | None] = (None,),
        enabled: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self.enabled = enabled
        # Registrations of sequences that were admitted in an earlier epoch are refused.
        self.epoch = 0
        self._block_size = block_size
        self._num_groups = len(windows)
        self._full = [group for group, window in enumerate(windows) if window is None]
        # Group -> blocks before a token at the beginning of a block that it may see.
        self._seen = {
            group: blocks_for(window - 1, block_size)
            for group, window in enumerate(windows)
            if window is not None
        }
        self._block_of: list[dict[bytes, int]] = [{} for _ in windows]
        self._digest_of: list[bytes | None] = [None] * num_blocks
        # Of named blocks: the group, and the place in the sequences, that they belong to.
        self._group_of = [0] * num_blocks
        self._index_of = [0] * num_blocks
        self._num_evictions = 0
        # The last evictions, (group, place, block).
        self._evicted: deque[tuple[int, int, int]] = deque(maxlen=_MAX_REMEMBERED)

    def __len__(self) -> int:
        return sum(map(len, self._block_of))

    def match(self, chain: HashChain, token_ids: Sequence[int]) -> Match:
        """The longest known prefix of a sequence, its blocks not yet shared.

        At least the last token is always left to compute, since its logits are what the next
        token is sampled from: at most ``(len(token_ids) - 1) // block_size`` blocks.
        """
        match = Match(self._num_groups)
        self.follow(match, chain, token_ids)
        return match

    def follow(self, match: Match, chain: HashChain, token_ids: Sequence[int]) -> None:
        """Bring a match up to date, to what :meth:`match` would find.

        Where a group sees everything the cost is what has changed since the last look, not the
        length of the prefix: evictions may have cut the match, registrations may have made it
        longer. Windows are looked for again from its end: a look-up for each block at most.
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
        if self._seen:
            length = self._agree(length, chain, token_ids)
            for group, seen in self._seen.items():
                known = self._block_of[group]
                places = range(max(0, length - seen), length)
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
                # What is in a window is looked for again anyway.
                if group not in self._seen and index < len(run) and run[index] == block:
                    match.cut(group, index)

    def _agree(self, length: int, chain: HashChain, token_ids: Sequence[int]) -> int:
        """The most blocks, up to ``length``, of which every window has what it sees of them.

        What a shorter prefix has is known to a group that sees everything; not so to the others
        when one of them shortens it, so they are asked until none does.
        """
        while True:
            before = length
            for group, seen in self._seen.items():
                known, first = self._block_of[group], length
                if seen and not known:
                    return 0
                while first > 0 and length - first < seen:
                    first -= 1
                    if chain.digest(first, token_ids) not in known:
                        length = first
            if length == before:
                return length

    def register(self, digest: bytes, block: int, index: int, group: int = 0) -> bool:
        """Offer a held block, whose KV is computed and confirmed, under its content's name.

        ``index`` is its place in its sequence.

        If another block has that name already, this one stays nameless and its content is given up
        with its last holder: tables are never rewritten under a running step.
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
        """Forget all content, that of running sequences too."""
        self.epoch += 1
        for known in self._block_of:
            known.clear()
        self._digest_of = [None] * self.pool.num_blocks
        # More than anybody can look up: every match starts anew.
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
