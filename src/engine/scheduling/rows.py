"""Rows: the fixed slots of device-resident request state.

A row is given to the next request only behind its fence (``row_allocator.py``). Its generation
counts how often it was given out, so plans and results of an earlier owner can be told apart.
"""

from __future__ import annotations

import heapq

from src.engine.kv.block_pool import InvariantError


class RowTable:
    """Knows which rows are taken, and the generation of each."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        # A heap: taking the lowest free row keeps the used rows dense on the device.
        self._free = list(range(num_rows))
        self._generation = [0] * num_rows
        self._taken = bytearray(num_rows)

    @property
    def num_free(self) -> int:
        """Rows that can be taken now."""
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """A free row and its new generation, counted from 1."""
        if not self._free:
            raise InvariantError(f"a row is asked for, all {self.num_rows} are taken")
        row = heapq.heappop(self._free)
        self._generation[row] += 1
        self._taken[row] = 1
        return row, self._generation[row]

    def release(self, row: int, generation: int) -> None:
        """Give a row back. The caller makes sure that its fence has passed."""
        if not self._taken[row] or self._generation[row] != generation:
            raise InvariantError(
                f"row {row} generation {generation} is released, but it is "
                f"{'taken' if self._taken[row] else 'free'} at {self._generation[row]}"
            )
        self._taken[row] = 0
        heapq.heappush(self._free, row)
