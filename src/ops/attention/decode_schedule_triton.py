# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The decode schedule on CUDA devices: a program per row finds its pack, one sums up tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from src.ops.attention.decode_schedule import (
    LEAST_SHARED,
    DecodeSchedule,
    key_column,
    schedule_size,
)
from src.ops.launching_triton import launcher, next_power_of_2

_CHUNK = 1024
"""Block table columns that are compared at once."""

_FEWEST_ROWS = 1024
"""Minimal number of rows that a program looks at, so that one variant serves small batches."""


# Arguments whose value or alignment varies from step to step must not select another variant: it
# would be compiled while a request waits.
@triton.jit(do_not_specialize=["block_tables", "seq_lens", "shared", "table_stride", "rows"])
def _pack_kernel(
    block_tables,  # [rows, table_stride] int32
    query_start_loc,  # [rows + 1] int32
    seq_lens,  # [rows] int32
    place,  # the parts of the schedule
    shared,
    members_of,
    table_stride,
    rows,
    column,
    least_length,
    block_size,
    tile,
    LEAST: tl.constexpr,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Find a row's place among rows with its key; if first, also its pack and what that shares."""
    row = tl.program_id(0)
    other = tl.arange(0, ROWS)
    exists = other < rows
    begin = tl.load(query_start_loc + other, mask=exists, other=0)
    end = tl.load(query_start_loc + other + 1, mask=exists, other=0)
    length = tl.load(seq_lens + other, mask=exists, other=0)
    able = exists & (end - begin == 1) & (length >= least_length)
    keys = tl.load(block_tables + other.to(tl.int64) * table_stride + column, mask=able, other=-1)
    # -1 is no block number: a row that shares nothing matches no other row.
    key = tl.sum(tl.where(other == row, keys, 0), 0)
    same = able & (keys == key)
    fellow = same.to(tl.int32)
    before = tl.cumsum(fellow, 0) - fellow
    rank = tl.sum(tl.where(other == row, before, 0), 0)
    first = rank // MEMBERS * MEMBERS
    head = tl.sum(tl.where(same & (before == first), other, 0), 0)
    tl.store(place + row, tl.where(key >= 0, head * MEMBERS + rank - first, -1))
    common = tl.sum(tl.where(other == row, length, 0), 0) // block_size
    count = 1
    is_head = (key >= 0) & (rank == first)
    tl.store(members_of + row * MEMBERS, tl.where(is_head, row, -1))
    for slot in range(1, MEMBERS):
        member = tl.max(tl.where(same & (before == first + slot), other, -1), 0)
        member = tl.where(is_head, member, -1)
        tl.store(members_of + row * MEMBERS + slot, member)
        if member >= 0:
            count += 1
            common = tl.minimum(common, tl.load(seq_lens + member) // block_size)
            at = 0
            while at < common:
                columns = at + tl.arange(0, CHUNK)
                compared = columns < common
                mine = tl.load(
                    block_tables + row.to(tl.int64) * table_stride + columns,
                    mask=compared,
                    other=0,
                )
                its = tl.load(
                    block_tables + member.to(tl.int64) * table_stride + columns,
                    mask=compared,
                    other=0,
                )
                common = tl.min(tl.where(mine != its, columns, common), 0)
                at += CHUNK
    tiles = common * block_size // tile
    tl.store(shared + row, tl.where((count > 1) & (tiles >= LEAST), tiles, 0))


_launch_pack = launcher(_pack_kernel)


@triton.jit(do_not_specialize=["seq_lens", "shared", "rows"])
def _starts_kernel(
    query_start_loc,
    seq_lens,
    starts,
    place,
    shared,
    rows,
    tile,
    window,
    chunk,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum up the number of tiles before each segment."""
    row = tl.arange(0, ROWS)
    exists = row < rows
    begin = tl.load(query_start_loc + row, mask=exists, other=0)
    end = tl.load(query_start_loc + row + 1, mask=exists, other=0)
    length = tl.load(seq_lens + row, mask=exists, other=0)
    at = tl.load(place + row, mask=exists, other=-1)
    of_pack = tl.load(shared + at // MEMBERS, mask=at >= 0, other=0)
    leading = tl.load(shared + row, mask=exists, other=0)
    in_window = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    in_chunk = tl.where(chunk > 0, (length - 1) // tl.maximum(chunk, 1) * chunk, 0)
    passed = tl.maximum(in_window, in_chunk) // tile
    total = tl.where(end - begin == 1, (length + tile - 1) // tile, 0)
    own = tl.maximum(total - tl.maximum(of_pack, passed), 0)
    until = tl.cumsum(leading + own, 0)
    tl.store(starts + 2 * row, until - leading - own, mask=exists)
    tl.store(starts + 2 * row + 1, until - own, mask=exists)
    tl.store(starts + 2 * rows, tl.sum(leading + own, 0))


_launch_starts = launcher(_starts_kernel)


@DecodeSchedule.taking_flat
def run(call: DecodeSchedule) -> Tensor:
    """Launch the kernels."""
    block_tables, query_start_loc, seq_lens, *numbers = call
    block_size, sliding_window, chunk, tile, members = numbers
    rows = block_tables.shape[0]
    schedule = torch.empty(
        schedule_size(rows, members), dtype=torch.int32, device=block_tables.device
    )
    if rows == 0:
        return schedule.zero_()
    starts, place, shared, members_of = schedule.split((2 * rows + 1, rows, rows, rows * members))
    padded = max(_FEWEST_ROWS, next_power_of_2(rows))
    column = key_column(tile, block_size)
    # With a window or chunks nothing is shared, so no row counts as long enough.
    least_length = 2**31 - 1 if sliding_window or chunk else (column + 1) * block_size
    _launch_pack(
        (rows,),
        block_tables, query_start_loc, seq_lens, place, shared, members_of,
        block_tables.stride(0), rows, column, least_length, block_size, tile,
        LEAST=LEAST_SHARED, MEMBERS=members, ROWS=padded, CHUNK=_CHUNK,
    )  # fmt: skip
    _launch_starts(
        (1,),
        query_start_loc, seq_lens, starts, place, shared, rows, tile, sliding_window, chunk,
        MEMBERS=members, ROWS=padded,
    )  # fmt: skip
    return schedule
