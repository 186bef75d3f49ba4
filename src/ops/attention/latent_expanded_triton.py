# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Latent attention for CUDA devices: the rows of a step that are expanded (`latent_expansion`).

The keys of all expanded rows stand one behind the other, and are cut into pieces of bounded size.
For each piece, its cached vectors are gathered, one matrix product makes keys and values of all
heads, and the queries attend over those. A softmax state goes from piece to piece: the output so
far, normalized, and its log-sum-exp. The last piece of a tile of queries writes the output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from src.ops.attention.attend_triton import LOG2_E, softmax_state
from src.ops.launching_triton import launcher, next_power_of_2
from src.ops.rows_triton import row_of
from src.ops.tuning import capability_of, of_capability


class ExpandedTile(NamedTuple):
    """Size of a program of attention: tokens of one head, and keys."""

    tokens: int
    keys: int
    warps: int
    stages: int


# (Compute capability or 0 for all others, bytes of an element) -> tile. One size serves all steps,
# so that none has to wait for a compiler. That of Hopper was the fastest of those measured on an
# H200; the others are reasoned. With 64 tokens and 8 warps, which is half a tile of Hopper's
# products for each warp, an H200 gave wrong sums in float32 (Triton 3.6, 24 + 16 elements of a
# key). 32 tokens take other products.
TILES = {
    (90, 2): ExpandedTile(128, 64, 8, 3),
    (0, 2): ExpandedTile(128, 64, 8, 2),
    (0, 4): ExpandedTile(32, 32, 4, 1),
}
_PIECE_BYTES = 128 << 20
"""Of the keys and values of a piece; a piece of fewer tokens than a tile fills would be slow."""


@triton.jit(do_not_specialize=["block_tables", "table_stride", "rows", "first", "count"])
def _gather_kernel(
    cache,  # [blocks, block_size, width]
    block_tables,  # [rows, table_stride] int32
    expansion,  # see `latent_expansion.Expansion`
    vectors,  # [count, width]
    table_stride,
    rows,
    first,
    count,
    width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the vector of one expanded key; the piece begins with key `first`."""
    number = tl.program_id(0)
    if number >= count:
        return
    row = row_of(expansion, rows, first + number)
    key = first + number - tl.load(expansion + row)
    block = tl.load(block_tables + row.to(tl.int64) * table_stride + key // BLOCK_SIZE)
    where = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * width
    offsets = tl.arange(0, BLOCK)
    vector = tl.load(cache + where + offsets, mask=offsets < width)
    tl.store(vectors + number.to(tl.int64) * width + offsets, vector, mask=offsets < width)


_launch_gather = launcher(_gather_kernel)


@triton.jit
def _attend_keys(
    acc,
    highest,
    total,
    plain,  # [M, D]: queries but for their rotated part
    rotated,  # [M, P]
    positions,  # [M]
    begin,
    end,
    made,
    vectors,
    before,
    head,
    scale_log2,
    CAUSAL: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    VALUE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
):
    """Add a row's keys [begin, end) to the softmax state; key k is at `before` + k in the piece.

    Without CAUSAL, every query sees all of them.
    """
    d = tl.arange(0, D)
    p = tl.arange(0, P)
    v = tl.arange(0, V)
    for start in range(begin, end, N):
        key = start + tl.arange(0, N)
        known = key < end
        place = (before + key).to(tl.int64)
        of_head = (place * HEADS + head) * (NOPE + VALUE)
        k = tl.load(
            made + of_head[:, None] + d[None, :],
            mask=known[:, None] & (d < NOPE)[None, :],
            other=0.0,
        )
        shared = tl.load(
            vectors + (place * (RANK + ROPE) + RANK)[:, None] + p[None, :],
            mask=known[:, None] & (p < ROPE)[None, :],
            other=0.0,
        )
        scores = tl.dot(plain, tl.trans(k), input_precision="tf32x3")
        scores += tl.dot(rotated, tl.trans(shared), input_precision="tf32x3")
        visible = known[None, :]
        if CAUSAL:
            visible = visible & (key[None, :] <= positions[:, None])
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        # Avoid -inf - -inf, which is NaN, in a row that has seen no key yet.
        base = tl.where(now == float("-inf"), 0.0, now) if CAUSAL else now
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(highest - base)
        values = tl.load(
            made + (of_head + NOPE)[:, None] + v[None, :],
            mask=known[:, None] & (v < VALUE)[None, :],
            other=0.0,
        )
        acc = acc * rescale[:, None]
        acc += tl.dot(weights.to(values.dtype), values, input_precision="tf32x3")
        total = total * rescale + tl.sum(weights, 1)
        highest = now
    return acc, highest, total


@triton.jit(do_not_specialize=["seq_lens", "rows", "first", "count"])
def _attend_kernel(
    query,  # [tokens, heads, NOPE + ROPE], rows query_stride apart
    made,  # [count, heads, NOPE + VALUE]: keys but for their rotated part, and values
    vectors,  # [count, RANK + ROPE]; only rotated keys are read
    expansion,  # see `latent_expansion.Expansion`
    query_start_loc,  # [rows + 1] int32
    seq_lens,  # [rows] int32
    state_out,  # [tokens, heads, VALUE] float32: output over the pieces so far, normalized
    state_lse,  # [tokens, heads] float32: log2 of the sum of its weights
    out,  # [tokens, heads, VALUE]
    query_stride,
    rows,
    first,
    count,
    scale_log2,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    VALUE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
):
    """M tokens of one row and one head, over the keys that a piece has of them.

    The piece has expanded keys [first, first + count). Tile i belongs to the row b with
    start[b] <= i < start[b + 1], where start[b] = query_start_loc[b] // M + b.
    """
    # A row's last tiles have the most keys, so they start first and do not delay the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // M + middle <= tile:
            low = middle
        else:
            high = middle
    row = low
    row_first = tl.load(expansion + row)
    if tl.load(expansion + row + 1) == row_first:
        return
    begin = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - begin
    offset = (tile - (begin // M + row)) * M
    if offset >= query_len:
        return
    queries = offset + tl.arange(0, M)
    exists = queries < query_len
    first_position = tl.load(seq_lens + row) - query_len + offset
    positions = first_position + tl.arange(0, M)
    # The keys of the tile: all, and those in this piece.
    end = first_position + tl.minimum(M, query_len - offset)
    start = tl.maximum(first - row_first, 0)
    stop = tl.minimum(first + count - row_first, end)
    if start >= stop:
        return
    token = (begin + queries).to(tl.int64)
    d = tl.arange(0, D)
    p = tl.arange(0, P)
    v = tl.arange(0, V)
    from_query = query + (token * query_stride + head * (NOPE + ROPE))[:, None]
    plain = tl.load(from_query + d[None, :], mask=exists[:, None] & (d < NOPE)[None, :], other=0.0)
    rotated = tl.load(
        from_query + NOPE + p[None, :], mask=exists[:, None] & (p < ROPE)[None, :], other=0.0
    )
    acc, highest, total = softmax_state(M, V)
    pair = token * HEADS + head
    place = pair[:, None] * VALUE + v[None, :]
    if start > 0:
        # Every query sees key 0, so each has a state.
        highest = tl.load(state_lse + pair, mask=exists, other=0.0)
        total = total + 1.0
        acc = tl.load(state_out + place, mask=exists[:, None] & (v < VALUE)[None, :], other=0.0)
    # Up to here, every query of the tile sees every key.
    masked = tl.minimum(tl.maximum((first_position + 1 - start) // N * N + start, start), stop)
    before = row_first - first
    acc, highest, total = _attend_keys(
        acc, highest, total, plain, rotated, positions, start, masked, made, vectors, before, head,
        scale_log2, False, HEADS, NOPE, ROPE, RANK, VALUE, N, D, P, V,
    )  # fmt: skip
    acc, highest, total = _attend_keys(
        acc, highest, total, plain, rotated, positions, masked, stop, made, vectors, before, head,
        scale_log2, True, HEADS, NOPE, ROPE, RANK, VALUE, N, D, P, V,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    stored = exists[:, None] & (v < VALUE)[None, :]
    if stop == end:
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=stored)
    else:
        tl.store(state_out + place, acc, mask=stored)
        tl.store(state_lse + pair, highest + tl.log2(total), mask=exists)


_launch_attend = launcher(_attend_kernel)


def tile_of(capability: int, size: int, *, D: int, P: int, V: int) -> ExpandedTile:
    """The tile for elements of `size` bytes and padded parts of keys and values.

    What was measured is for heads as DeepSeek has them; larger ones take smaller tiles.
    """
    is_large = D > 128 or P > 64 or V > 128
    return of_capability(TILES, 0 if is_large else capability, size)


def run(
    query: Tensor,
    cache: Tensor,
    up: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    scale: float,
    expansion: Tensor,
    expanded_keys: int,
) -> None:
    """Attend for the expanded rows, whose vectors are in the cache.

    Arguments as in `latent_attention`. The memory that is taken depends on the number of tokens and
    on the model, but not on the lengths of contexts.
    """
    tokens, heads, _ = query.shape
    block_size, width = cache.shape[1:]
    rank, value, rows = up.shape[2], out.shape[2], len(block_tables)
    nope, rope = up.shape[1] - value, width - rank
    most = piece_keys(up)
    vectors, made = query.new_empty((most, width)), query.new_empty((most, up[:, :, 0].numel()))
    state_out = query.new_empty((tokens, heads, value), dtype=torch.float32)
    state_lse = query.new_empty((tokens, heads), dtype=torch.float32)
    padded = {
        name: max(16, next_power_of_2(size))
        for name, size in (("D", nope), ("P", rope), ("V", value))
    }
    tile = tile_of(capability_of(query.device), query.element_size(), **padded)
    projection = up.flatten(0, 1).T
    # Without keys, kernels are only warmed up.
    for first in range(0, max(1, expanded_keys), most):
        count = min(most, expanded_keys - first)
        _launch_gather(
            (max(1, count),),
            cache, block_tables, expansion, vectors, block_tables.stride(0), rows, first, count,
            width, BLOCK_SIZE=block_size, BLOCK=next_power_of_2(width),
        )  # fmt: skip
        torch.mm(vectors[:count, :rank], projection, out=made[:count])
        _launch_attend(
            (tokens // tile.tokens + rows, heads),
            query, made, vectors, expansion, query_start_loc, seq_lens, state_out, state_lse, out,
            query.stride(0), rows, first, count, scale * LOG2_E,
            HEADS=heads, NOPE=nope, ROPE=rope, RANK=rank, VALUE=value, M=tile.tokens, N=tile.keys,
            **padded, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def piece_keys(up: Tensor) -> int:
    """How many keys are expanded at once, for all heads of the projection."""
    per_key = up.shape[0] * up.shape[1] * up.element_size()
    return max(64, _PIECE_BYTES // per_key)
