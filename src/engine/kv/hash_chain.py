"""Names of prefixes: a chain of hashes, one for each full block of a sequence.

The KV of a block depends on its own tokens and on all tokens before it. So a block is identified by
a chain of hashes: ``digest(i) = sha256(digest(i - 1) + tokens of block i + its media)``. The root
of the chain contains everything else that the KV depends on, and the cache salt. The hash is sha256
and not a faster one, because clients share this table: whoever could construct a collision would
read another client's context.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache

from src.engine.kv.block_pool import InvariantError


@lru_cache(256)  # nearly all requests have the same
def chain_root(
    content_key: str, layout: str, salt: str, adapter: bytes = b"", tenant: str = ""
) -> bytes:
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
    tenant
        Whose KV it is, or empty where all share theirs.
    """
    parts = (content_key.encode(), layout.encode(), salt.encode(), adapter)
    # Lengths are included, or the end of one part could be taken for the start of the next.
    told = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    if tenant:
        told += tenant.encode()
    return hashlib.sha256(b"slipstream-kv\0" + told).digest()


class HashChain:
    """The digests of one sequence's full blocks, each computed once and on demand.

    A sequence only grows at its end, so a digest never changes, not even by preemption.

    Parameters
    ----------
    root
        From `chain_root`.
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
