"""Takes KV memory from the system before a step writes it, while there is nothing to compute."""

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
    """Keeps a stretch of a pool on the host taken ahead of the blocks that were ever used.

    The system gives a page when it is first written to, and zeroes it: in the middle of a step,
    and where a virtual machine's host has to find it too, that takes longer than what is computed
    for the tokens in it. Taking the whole pool at once would take memory that may never be used.
    The pool hands out its blocks in ascending order until it has to use some again.

    Parameters
    ----------
    cache
        A pool in host memory, as :func:`~src.engine.execution.kv_cache.allocate_kv_cache` makes it.
    ahead_bytes
        How far, over all slots.
    take_pages
        :func:`~src.ops.host_memory.take`.
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
        # Per tensor, in bytes. Smaller ones come from torch, which has touched them.
        self._taken = [0 if t.nbytes >= LARGE_PAGE else t.nbytes for t in self._tensors]
        # Blocks that are taken in all of them.
        self._least = min(map(self._blocks_of, range(len(self._tensors))))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to take, for the blocks that are used by now."""
        return self._least >= min(self._num_blocks, self._used + self._ahead)

    def follow(self, plan: StepPlan) -> None:
        """Note the blocks that a step begins to use."""
        tables = [table for install in plan.installs for table in install.block_ids]
        tables += [append.block_ids for append in plan.block_appends]
        self._used = max(self._used, 1 + max(map(max, filter(None, tables)), default=-1))

    def take_next(self) -> None:
        """Take one page of the slot that has the fewest blocks; milliseconds at most."""
        index = min(range(len(self._tensors)), key=self._blocks_of)
        tensor = self._tensors[index]
        per_block = tensor.nbytes // self._num_blocks
        # What a step was quicker to touch is there.
        start = max(self._taken[index], self._used * per_block // LARGE_PAGE * LARGE_PAGE)
        if start < tensor.nbytes and not self._take_pages(tensor, start, LARGE_PAGE):
            self._least = self._num_blocks
            return
        self._taken[index] = min(tensor.nbytes, start + LARGE_PAGE)
        self._least = min(map(self._blocks_of, range(len(self._tensors))))

    def _blocks_of(self, index: int) -> int:
        return self._taken[index] * self._num_blocks // self._tensors[index].nbytes
