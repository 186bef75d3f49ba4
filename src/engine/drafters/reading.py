"""What a drafter has read of its rows' texts, and of the blocks that rows share.

A drafter's keys and values lie in the model's blocks, and the prefix cache shares these. But it
reads a text behind the model, and not all of it: what it has skipped stands in no memory any more.
So a row's drafter sees the text from the block on behind which nothing is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from src.engine.devices.transfer import host_view
from src.engine.drafters.source import DraftPlace
from src.engine.execution.inputs import StepInputs


class Reading:
    """Up to where each row was read, and which positions of blocks were.

    Parameters
    ----------
    place
        Of the drafter. The blocks of its first layers that see all of a text stand for all.
    """

    def __init__(self, place: DraftPlace) -> None:
        cache = place.kv_cache
        self._size = place.rows.block_size
        own = [number for number, group in enumerate(cache.layout.groups) if group.layers]
        whole = [number for number in own if cache.layout.windows[number] is None]
        group = (whole or own)[0]
        # [R + 1, blocks of a row] int32: row, position // block size -> block; a view.
        self._tables = host_view(place.rows.block_tables[group])
        # Block -> how many of its positions were read, the first ones.
        count = cache.plan.num_blocks * cache.layout.page_blocks[group]
        self._read_b = np.zeros(count, np.int32)
        # Row -> the position behind the last that was read.
        self._read: dict[int, int] = {}
        # Row -> the first position that its drafter sees, of those for which it is not 0.
        self.first: dict[int, int] = {}

    def vacate(self, row: int) -> None:
        """The row has another request now."""
        self._read.pop(row, None)
        self.first.pop(row, None)

    def forget(self) -> None:
        """Whatever the model computes from now on is not read: no row may begin in what was."""
        self._read_b.fill(0)

    def write(self, row: int, start: int, end: int) -> None:
        """The model has computed positions of a row. In blocks that begin there nothing is read."""
        for block in self._numbers(row, -(-start // self._size), -(-end // self._size)):
            if block >= 0:
                self._read_b[block] = 0

    def begin(self, row: int, start: int) -> int:
        """The first position from ``start`` on that the row's drafter may read.

        Where those before it were not read, and have been read by nobody, it sees the text from
        there on only.
        """
        if start > self._read.get(row, 0):
            first = self._whole_from(row, start)
            self._read[row] = max(first, start)
            self.first.pop(row, None)
            if first:
                self.first[row] = first
        return max(start, self.first.get(row, 0))

    def num_read(self, row: int, end: int) -> int:
        """How many of a row's first ``end`` positions were read, by anybody."""
        size = self._size
        for number, block in enumerate(self._numbers(row, 0, -(-end // size))):
            # Of those that a window has passed nobody reads anything.
            if block >= 0 and self._read_b[block] < min(size, end - number * size):
                return number * size + int(self._read_b[block])
        return end

    def read(self, row: int, start: int, end: int) -> None:
        """The drafter has read these positions of a row, and those since the last ones before."""
        first = min(start, self._read.get(row, start)) // self._size
        self._read[row] = end
        for number, block in enumerate(self._numbers(row, first, -(-end // self._size)), first):
            count = min(self._size, end - number * self._size)
            if block >= 0:
                self._read_b[block] = max(self._read_b[block], count)

    def _whole_from(self, row: int, end: int) -> int:
        """The begin of the first block from which on all positions before ``end`` were read."""
        number = -(-end // self._size)
        for block in reversed(self._numbers(row, 0, number)):
            if self._read_b[block] < min(self._size, end - (number - 1) * self._size):
                break
            number -= 1
        return number * self._size

    def _numbers(self, row: int, first: int, end: int) -> Sequence[int]:
        """The row's blocks in these places of its table; negative where there is none."""
        if self._tables is None or first >= end:
            return ()
        blocks: list[int] = self._tables[row, first:end].tolist()
        return blocks


def seen_from(
    inputs: StepInputs, rows: Sequence[int], first: Mapping[int, int], block_size: int
) -> StepInputs:
    """Inputs whose attention sees each row's text from a position on.

    Tokens keep their positions, and so keys are those of any other row with the same text.

    Parameters
    ----------
    rows
        Of the inputs, in order.
    first
        Row -> the position, the begin of a block; 0 for others.
    """
    if not any(row in first for row in rows):
        return inputs
    skipped_b = [first.get(row, 0) for row in rows]
    lengths_b = inputs.lengths_b
    if lengths_b is not None:
        lengths_b = np.stack((lengths_b[0], lengths_b[1] - skipped_b))
    last = inputs.last
    if last is not None:
        skipped_s = [first.get(row, 0) for row in inputs.samplers.rows]
        last = replace(
            last,
            seq_lens_b=_less(last.seq_lens_b, skipped_s),
            block_tables_b=_behind(last.block_tables_b, skipped_s, block_size),
        )
    return replace(
        inputs,
        seq_lens_b=_less(inputs.seq_lens_b, skipped_b),
        block_tables_b=_behind(inputs.block_tables_b, skipped_b, block_size),
        lengths_b=lengths_b,
        last=last,
    )


def _less(lengths: Tensor, skipped: Sequence[int]) -> Tensor:
    return lengths - torch.tensor(skipped, dtype=lengths.dtype, device=lengths.device)


def _behind(
    tables: Sequence[Tensor], skipped: Sequence[int], block_size: int
) -> tuple[Tensor, ...]:
    """Block tables [B, N] without their first blocks; what is behind them is read by nobody."""
    moved = []
    for table in tables:
        numbers = torch.arange(table.shape[1], device=table.device)
        begins = torch.tensor(skipped, device=table.device) // block_size
        index = (begins[:, None] + numbers).clamp(max=table.shape[1] - 1)
        moved.append(table.gather(1, index))
    return tuple(moved)
