"""Touches pages of KV memory while the engine is idle, before a step has to write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

from src.core.config import MIB
from src.core.plan import StepPlan
from src.engine.execution.kv_cache import KVCache
from src.ops.host_memory import LARGE_PAGE, take

_AHEAD_BYTES: Final = 256 * MIB


class PagePrefault:
    """Keeps some memory of a host pool touched ahead of the highest block that was ever used.

    The system allocates and zeroes a page at its first write. In the middle of a step, and in a
    virtual machine whose host has to find the page too, that takes longer than computing the tokens
    in it. Touching the whole pool at once would take memory that may never be used. The pool
    allocates its blocks in ascending order until it reuses some.

    Parameters
    ----------
    cache
        A pool in host memory, as `allocate_kv_cache` makes it.
    ahead_bytes
        Bytes over all slots to keep touched ahead.
    take_pages
        `take`.
    """

    def __init__(
        self,
        cache: KVCache,
        ahead_bytes: int = _AHEAD_BYTES,
        take_pages: Callable[[Tensor, int, int], bool] = take,
    ) -> None:
        plan = cache.plan
        self._tensors = cache.memory
        self._take_pages = take_pages
        self._num_blocks = plan.num_blocks
        self._ahead = max(1, ahead_bytes // plan.bytes_per_block)
        self._used = 0
        # Bytes touched per tensor. Small tensors come from torch, which has touched them already.
        self._taken = [0 if t.nbytes >= LARGE_PAGE else t.nbytes for t in self._tensors]
        # Blocks that are touched in all tensors.
        self._least = min(map(self._blocks_of, range(len(self._tensors))))

    @property
    def is_complete(self) -> bool:
        """Whether enough memory is touched ahead of the blocks used so far."""
        return self._least >= min(self._num_blocks, self._used + self._ahead)

    def follow(self, plan: StepPlan) -> None:
        """Note the blocks that a step's plan allocates."""
        tables = [table for install in plan.installs for table in install.block_ids]
        tables += [append.block_ids for append in plan.block_appends]
        self._used = max(self._used, 1 + max(map(max, filter(None, tables)), default=-1))

    def take_next(self) -> None:
        """Touch one page of the tensor with the fewest touched blocks; takes milliseconds."""
        index = min(range(len(self._tensors)), key=self._blocks_of)
        tensor = self._tensors[index]
        per_block = tensor.nbytes // self._num_blocks
        # Skips pages that steps have touched meanwhile.
        start = max(self._taken[index], self._used * per_block // LARGE_PAGE * LARGE_PAGE)
        if start < tensor.nbytes and not self._take_pages(tensor, start, LARGE_PAGE):
            self._least = self._num_blocks
            return
        self._taken[index] = min(tensor.nbytes, start + LARGE_PAGE)
        self._least = min(map(self._blocks_of, range(len(self._tensors))))

    def _blocks_of(self, index: int) -> int:
        return self._taken[index] * self._num_blocks // self._tensors[index].nbytes
