"""The block pool: which blocks of KV memory are free, cached or held.

Every block is in exactly one of three states::

    free     no request holds it, its content is of no use        (a stack)
    cached   no request holds it, its content may be used again   (an LRU, oldest evicted first)
    held     one or more requests have it in their block tables   (a reference count)

    free + cached + held == total, always.

The pool knows block ids and reference counts only. It does not know which tokens, layers or how
many bytes a block holds. Several groups of layers take blocks from it for their own block tables.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class InvariantError(AssertionError):
    """The engine's bookkeeping is inconsistent: a bug, never a client's fault."""


class BlockPool:
    """Blocks ``0 .. num_blocks - 1`` with reference counts; every operation is O(1) per block.

    Parameters
    ----------
    num_blocks
        How many blocks there are.
    on_evict
        Called with the id of a cached block that is about to be evicted.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        # Whether the block becomes cached, not free, when its last holder releases it.
        self._keep = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_held = 0
        self._num_shifts = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds and whose content may be used again."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks in the table of at least one request."""
        return self._num_held

    @property
    def num_shifts(self) -> int:
        """How often a block went from cached to held by sharing, or back to cached."""
        return self._num_shifts

    def count_held(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` are held; O(their number)."""
        # No Python loop, because there may be thousands.
        return len(blocks) - list(map(self._references.__getitem__, blocks)).count(0)

    @property
    def is_whole(self) -> bool:
        """Whether free + cached + held == total."""
        return len(self._free) + len(self._cached) + self._num_held == self.num_blocks

    def snapshot(self) -> tuple[list[int], list[int]]:
        """Copies of every block's reference count, and of the cached blocks, oldest first."""
        return self._references[:], list(self._cached)

    def is_held(self, block: int) -> bool:
        """Whether any request holds the block."""
        return self._references[block] > 0

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks: free ones first, then the least recently used cached ones.

        Raises
        ------
        InvariantError
            If there are fewer. The caller has to check ``num_free`` first.
        """
        if count > self.num_free:
            raise InvariantError(f"{count} blocks asked for, {self.num_free} are free")
        self._num_held += count
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._keep[block] = 0
                if self._on_evict is not None:
                    self._on_evict(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of ``blocks``, which are cached or held."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise InvariantError(f"block {block} is free: its content cannot be shared")
                del self._cached[block]
                self._num_held += 1
                self._num_shifts += 1
            self._references[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """Take one holder from each block of a table.

        The table is walked from its end, so that a sequence's tail is evicted before its head. A
        cached tail is of no use without the blocks before it.
        """
        for block in reversed(table):
            left = self._references[block] - 1
            if left < 0:
                raise InvariantError(f"block {block} is released but nobody holds it")
            self._references[block] = left
            if left == 0:
                self._num_held -= 1
                if self._keep[block]:
                    self._cached[block] = None
                    self._num_shifts += 1
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """Mark a held block to become cached when its last holder releases it."""
        if self._references[block] == 0:
            raise InvariantError(f"block {block} is marked for keeping but nobody holds it")
        self._keep[block] = 1

    def forget(self) -> None:
        """Forget the content of every block, held ones too; ``on_evict`` is not called."""
        self._keep = bytearray(self.num_blocks)
        self._free.extend(self._cached)
        self._cached.clear()

    def frees_some(self, tables: Sequence[Sequence[int]]) -> bool:
        """Whether releasing all these tables would free at least one block."""
        references = self._references
        # The last block of a table is almost never shared, so this usually ends at the first one.
        if any(references[block] == 1 for table in tables for block in reversed(table)):
            return True
        counts = Counter(block for table in tables for block in table)
        return any(references[block] == count for block, count in counts.items())

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Check every reference count against ``tables``, which are all that exist; O(all blocks).

        Raises
        ------
        InvariantError
            A count is wrong; the message says which.
        """
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        if expected != self._references:
            block = next(b for b in range(self.num_blocks) if expected[b] != self._references[b])
            raise InvariantError(
                f"block {block} has {self._references[block]} references, "
                f"{expected[block]} tables hold it"
            )
        unheld = expected.count(0)
        if len(self._cached.keys() | set(self._free)) != unheld or self.num_free != unheld:
            raise InvariantError(
                f"{unheld} blocks are not held, but {len(self._free)} are free and "
                f"{len(self._cached)} cached"
            )
        if not self.is_whole:
            raise InvariantError(
                f"free {len(self._free)} + cached {len(self._cached)} + held {self._num_held} "
                f"!= total {self.num_blocks}"
            )
        if not all(self._keep[block] for block in self._cached):
            raise InvariantError("a cached block is not marked for keeping")
