"""The prefix cache: from the content of a prefix to the block that holds its last tokens' KV.

The KV of a block depends on its own tokens and on all before them, so a block is named by a chain
of hashes: ``digest(i) = sha256(digest(i - 1) + tokens of block i)``, with the cache salt in the
chain's root. sha256 rather than a fast hash, because two clients share this table and a collision
that somebody can construct would hand one the other's context.

Source of the scheme: vLLM's automatic prefix caching (docs.vllm.ai, "Automatic Prefix Caching").
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from src.engine.kv.block_pool import BlockPool, InvariantError

# Evictions that are remembered, for matches to be corrected by; who missed more starts anew.
_MAX_REMEMBERED: Final = 4096


class HashChain:
    """The digests of one sequence's full blocks, computed once each and only when asked for.

    A sequence only grows at its end, so a digest never changes; it survives preemption.
    """

    __slots__ = ("_block_size", "_digests", "_num_shared", "_root", "_salt", "_trunk")

    def __init__(self, block_size: int, salt: str) -> None:
        self._block_size = block_size
        self._salt = salt
        self._root = hashlib.sha256(b"slipstream-kv\0" + salt.encode()).digest()
        # Of the blocks behind the first ``_num_shared``, which are the trunk's.
        self._digests: list[bytes] = []
        self._trunk: HashChain | None = None
        self._num_shared = 0

    def branch(self, num_tokens: int) -> HashChain:
        """The chain of a sequence that has the first ``num_tokens`` tokens in common with this."""
        branch = HashChain(self._block_size, self._salt)
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
            digests.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return digests[index - num_shared]


class Match:
    """The longest known prefix of one sequence, kept from one look to the next.

    Attributes
    ----------
    blocks
        Its blocks, not shared.
    """

    __slots__ = ("_counted_at", "_num_held", "blocks", "evictions")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        # The cache's count of evictions that ``blocks`` knows of.
        self.evictions = 0
        # When held blocks were counted last, on the pool's clock; -1 since ``blocks`` changed.
        self._counted_at = -1
        self._num_held = 0

    def cut(self, length: int) -> None:
        """Give up what lies behind the first ``length`` blocks."""
        del self.blocks[length:]
        self._counted_at = -1

    def extend(self, block: int) -> None:
        """Add the next block."""
        self.blocks.append(block)
        self._counted_at = -1

    def num_held(self, pool: BlockPool) -> int:
        """How many of the blocks somebody holds; counted only if that may have changed."""
        if self._counted_at != pool.num_shifts:
            self._num_held = pool.count_held(self.blocks)
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
    enabled
        When false, nothing is ever registered and so nothing found.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enabled: bool = True) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self.enabled = enabled
        # Registrations of sequences that were admitted in an earlier epoch are refused.
        self.epoch = 0
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._digest_of: list[bytes | None] = [None] * num_blocks
        # Of named blocks: the place in the sequences that they belong to.
        self._index_of = [0] * num_blocks
        self._num_evictions = 0
        # The last evictions, (place, block).
        self._evicted: deque[tuple[int, int]] = deque(maxlen=_MAX_REMEMBERED)

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, chain: HashChain, token_ids: Sequence[int]) -> list[int]:
        """The blocks that hold the longest known prefix of a sequence, not yet shared.

        At least the last token is always left to compute, since its logits are what the next
        token is sampled from: at most ``(len(token_ids) - 1) // block_size`` blocks.
        """
        match = Match()
        self.follow(match, chain, token_ids)
        return match.blocks

    def follow(self, match: Match, chain: HashChain, token_ids: Sequence[int]) -> None:
        """Bring a match up to date, to what :meth:`match` would find.

        The cost is what has changed since the last look, not the length of the prefix: evictions
        may have cut the match, registrations may have made it longer.
        """
        missed = self._num_evictions - match.evictions
        match.evictions = self._num_evictions
        if missed and match.blocks:
            if missed > len(self._evicted):
                match.cut(0)
            for index, block in islice(reversed(self._evicted), missed):
                if index < len(match.blocks) and match.blocks[index] == block:
                    match.cut(index)
        if not self._block_of:
            return
        for index in range(len(match.blocks), (len(token_ids) - 1) // self._block_size):
            found = self._block_of.get(chain.digest(index, token_ids))
            if found is None:
                break
            match.extend(found)

    def register(self, digest: bytes, block: int, index: int) -> bool:
        """Offer a held block, whose KV is computed and confirmed, under its content's name.

        ``index`` is its place in its sequence.

        If another block has that name already, this one stays nameless and its content is given up
        with its last holder: tables are never rewritten under a running step.
        """
        if digest in self._block_of:
            return False
        self._block_of[digest] = block
        self._digest_of[block] = digest
        self._index_of[block] = index
        self.pool.keep(block)
        return True

    def reset(self) -> None:
        """Forget all content, that of running sequences too."""
        self.epoch += 1
        self._block_of.clear()
        self._digest_of = [None] * self.pool.num_blocks
        # More than anybody can look up: every match starts anew.
        self._evicted.clear()
        self._num_evictions += 1
        self.pool.forget()

    def _forget(self, block: int) -> None:
        digest = self._digest_of[block]
        if digest is None:
            raise InvariantError(f"cached block {block} has no digest")
        self._digest_of[block] = None
        del self._block_of[digest]
        self._num_evictions += 1
        self._evicted.append((self._index_of[block], block))
