"""Snapshots of recurrent states, found by the digest of the prefix that they follow.

A recurrent state stands for all tokens before it, and the next token overwrites it. So what can be
used again is a copy, made when the state stood at the end of a block. A copy lies in a *snapshot
slot*; the slots have a pool of their own, because a state has the bytes of many blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from src.engine.kv.block_pool import BlockPool, InvariantError
from src.engine.kv.hash_chain import HashChain


class StateCache:
    """Maps digests of prefixes to snapshot slots ``0 .. num_slots - 1``.

    A slot is held from the plan that writes it until that step is committed. Then it is cached
    under its prefix's digest, or free. Nobody holds a cached slot. Reading it needs no hold,
    because a device reads and writes slots in the order of plans.
    """

    def __init__(self, num_slots: int) -> None:
        self.pool = BlockPool(num_slots, on_evict=self._forget)
        self._slot_of: dict[bytes, int] = {}
        # Of registered slots: the digest, and the number of blocks of the prefix.
        self._digest_of: list[bytes | None] = [None] * num_slots
        self._length_of = [0] * num_slots

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slot_of

    def latest(self, length: int, chain: HashChain, token_ids: Sequence[int]) -> int:
        """Blocks of the longest prefix, up to ``length`` blocks, that has a snapshot; 0 if none.

        Looks up every block of the prefix or every length that snapshots have, whichever are fewer.
        """
        lengths: Iterable[int] = range(length, 0, -1)
        if len(self._slot_of) < length:
            known = {self._length_of[slot] for slot in self._slot_of.values()}
            lengths = sorted((each for each in known if each <= length), reverse=True)
        for each in lengths:
            if chain.digest(each - 1, token_ids) in self._slot_of:
                return each
        return 0

    def use(self, digest: bytes) -> int:
        """The slot of a digest that is known; it becomes the one that is evicted last."""
        slot = self._slot_of[digest]
        self.pool.share([slot])
        self.pool.release([slot])
        return slot

    def take(self) -> int | None:
        """A slot to write to: a free one, or the least recently used; ``None`` if all are held."""
        return self.pool.allocate(1)[0] if self.pool.num_free else None

    def register(self, digest: bytes, slot: int, length: int) -> None:
        """Name a held slot that a committed step has written, and give up the hold.

        Where another slot has the digest already, this one becomes free.
        """
        if digest not in self._slot_of:
            self._slot_of[digest] = slot
            self._digest_of[slot] = digest
            self._length_of[slot] = length
            self.pool.keep(slot)
        self.pool.release([slot])

    def give_up(self, slot: int) -> None:
        """Free a held slot whose content is of no use."""
        self.pool.release([slot])

    def reset(self) -> None:
        """Forget all snapshots."""
        self._slot_of.clear()
        self._digest_of = [None] * self.pool.num_blocks
        self.pool.forget()

    def check(self, held: Sequence[int]) -> None:
        """Check that exactly these slots are held, and that every name fits its slot; O(slots).

        Raises
        ------
        InvariantError
            A slot was lost, is used twice, or has a wrong name.
        """
        self.pool.check([[slot] for slot in held])
        named = {slot: digest for digest, slot in self._slot_of.items()}
        if any(named.get(slot) != digest for slot, digest in enumerate(self._digest_of)):
            raise InvariantError("a snapshot's name does not lead to it")
        if len(named) != len(self._slot_of) or self.pool.num_cached != len(named):
            raise InvariantError(f"{len(named)} snapshots are named, {self.pool.num_cached} cached")

    def _forget(self, slot: int) -> None:
        digest = self._digest_of[slot]
        if digest is None:
            raise InvariantError(f"cached snapshot {slot} has no digest")
        self._digest_of[slot] = None
        del self._slot_of[digest]
