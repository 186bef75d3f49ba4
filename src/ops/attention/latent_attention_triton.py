# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Latent attention for CUDA devices: writes the cache, and computes the rows that are absorbed.

A call's plan names the rows that are expanded (`latent_expanded`); without one every row is
absorbed. The projection of keys is applied to the queries, then all heads attend over the cached
vectors, and the projection of values is applied to the result. The heads of a row's tokens are
packed into tiles. The keys of a tile are cut into splits, and a merge joins their sums in order.
The number of splits depends on the number of tokens and on the device, never on device data, so a
launch can be captured. In deterministic mode there is one split.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from src.ops.attention import latent_expanded_triton as latent_expanded
from src.ops.attention.attend_triton import LOG2_E
from src.ops.attention.latent_attention import LatentAttention
from src.ops.launching_triton import ceil_div, launcher, next_power_of_2
from src.ops.tuning import capability_of, multiprocessors, of_capability


class Tile(NamedTuple):
    """Size of a program of attention."""

    packed: int
    keys: int
    warps: int
    stages: int


# (Compute capability or 0 for all others, bytes of an element) -> tile. One size serves all steps,
# so that none has to wait for a compiler. That of Hopper was the fastest of those measured on an
# H200; the others are reasoned.
_TILES = {
    (90, 2): Tile(64, 64, 8, 2),
    (0, 2): Tile(64, 32, 8, 2),
    (0, 4): Tile(32, 16, 8, 1),
}
_PROJECTED = 16  # tokens of a program of a projection
_COPIED = 1024


@triton.jit(do_not_specialize=["slot_mapping", "rows"])
def _write_kernel(
    latent,  # [tokens, width], rows latent_stride apart
    cache,  # [blocks, block_size, width]
    slot_mapping,  # [tokens] int64
    out,  # [tokens, out_width]
    query_start_loc,
    latent_stride,
    rows,
    width,
    out_width,
    BLOCK: tl.constexpr,
):
    """Store a token's vector; for a padding token, store zeros in `out`."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping + token)
    written = offsets < tl.where(slot >= 0, width, 0)
    vector = tl.load(latent + token * latent_stride + offsets, mask=written)
    tl.store(cache + slot * width + offsets, vector, mask=written)
    padding = token >= tl.load(query_start_loc + rows)
    zeros = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    tl.store(
        out + token * out_width + offsets, zeros, mask=offsets < tl.where(padding, out_width, 0)
    )


_launch_write = launcher(_write_kernel)


@triton.jit(do_not_specialize=["rows", "has_plan"])
def _project_kernel(
    x,  # token t, head h, input i: x + t * x_token + h * x_head + i
    weight,  # head h, output o, input i: weight + h * w_head + o * w_output + i * w_input
    to,  # token t, head h, output o: to + t * to_token + h * to_head + o
    query_start_loc,
    expansion,  # see `latent_expansion.Expansion`; not read without `has_plan`
    rows,
    has_plan,
    x_token,
    x_head,
    w_head,
    w_output,
    w_input,
    to_token,
    to_head,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Multiply M tokens of one head by N outputs of its matrix.

    Padding tokens are left out, and those of expanded rows.
    """
    token = tl.program_id(0) * M + tl.arange(0, M)
    head = tl.program_id(1).to(tl.int64)
    output = tl.program_id(2) * N + tl.arange(0, N)
    tokens = tl.load(query_start_loc + rows)
    marked = token < tl.where(has_plan > 0, tokens, 0)
    is_expanded = tl.load(expansion + rows + 1 + token, mask=marked, other=0)
    exists = (token < tokens) & (is_expanded == 0)
    if tl.max(exists.to(tl.int32), 0) == 0:
        return
    acc = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, INPUTS, K):
        i = start + tl.arange(0, K)
        a = tl.load(
            x + token.to(tl.int64)[:, None] * x_token + head * x_head + i[None, :],
            mask=exists[:, None] & (i < INPUTS)[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + head * w_head + output[None, :] * w_output + i[:, None] * w_input,
            mask=(output < OUTPUTS)[None, :] & (i < INPUTS)[:, None],
            other=0.0,
        )
        acc += tl.dot(a, b, input_precision="tf32x3")
    tl.store(
        to + token.to(tl.int64)[:, None] * to_token + head * to_head + output[None, :],
        acc.to(to.dtype.element_ty),
        mask=exists[:, None] & (output < OUTPUTS)[None, :],
    )


_launch_project = launcher(_project_kernel)


@triton.jit
def _is_expanded(expansion, row, has_plan):
    before = tl.load(expansion + row, mask=has_plan > 0, other=0)
    return tl.load(expansion + row + 1, mask=has_plan > 0, other=0) > before


@triton.jit(
    do_not_specialize=["block_tables", "seq_lens", "table_stride", "rows", "num_tokens", "has_plan"]
)
def _attend_kernel(
    absorbed,  # [tokens, heads, RANK]
    query,  # [tokens, heads, NOPE + ROPE], rows query_stride apart; only rotated parts are read
    cache,  # [blocks, block_size, RANK + ROPE]
    block_tables,  # [rows, table_stride] int32
    query_start_loc,  # [rows + 1] int32
    seq_lens,  # [rows] int32
    expansion,  # as of `_project_kernel`
    partial_out,  # [splits, tokens, heads, RANK] normalised; float32, or `absorbed` for one split
    partial_lse,  # [splits, tokens, heads] float32, log2 of the split's sum; -inf for no keys
    query_stride,
    table_stride,
    rows,
    has_plan,
    num_tokens,
    scale_log2,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
):
    """One tile of M packed (token, head) pairs of one row, over one split of its keys.

    Tile i belongs to the row b with first[b] <= i < first[b + 1], where first[b] =
    query_start_loc[b] * HEADS // M + b leaves at least ceil(query_len * HEADS / M) tiles a row.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) * HEADS // M + middle <= tile:
            low = middle
        else:
            high = middle
    row = low
    begin = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - begin
    first = (tile - (begin * HEADS // M + row)) * M
    if first >= query_len * HEADS or _is_expanded(expansion, row, has_plan):
        return
    packed = first + tl.arange(0, M)
    exists = packed < query_len * HEADS
    position = tl.load(seq_lens + row) - query_len + packed // HEADS
    token = (begin + packed // HEADS).to(tl.int64)
    head = packed % HEADS
    r = tl.arange(0, R)
    p = tl.arange(0, P)
    pair = token * HEADS + head
    q = tl.load(
        absorbed + pair[:, None] * RANK + r[None, :],
        mask=exists[:, None] & (r < RANK)[None, :],
        other=0.0,
    )
    rotated = tl.load(
        query + (token * query_stride + head * (NOPE + ROPE) + NOPE)[:, None] + p[None, :],
        mask=exists[:, None] & (p < ROPE)[None, :],
        other=0.0,
    )
    last = tl.minimum((first + M - 1) // HEADS, query_len - 1)
    end = tl.load(seq_lens + row) - query_len + last + 1
    share = (((end + N - 1) // N + splits - 1) // splits) * N
    stop = tl.minimum((split + 1) * share, end)
    table = block_tables + row.to(tl.int64) * table_stride
    acc = tl.zeros([M, R], dtype=tl.float32)
    highest = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    for start in range(split * share, stop, N):
        key = start + tl.arange(0, N)
        known = key < stop
        if BLOCK_SIZE % N == 0:
            # The tile lies in one block: look up one block number; its vectors are consecutive.
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + start % BLOCK_SIZE + tl.arange(0, N)
        else:
            blocks = tl.load(table + key // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            slot = blocks * BLOCK_SIZE + key % BLOCK_SIZE
        where = slot * (RANK + ROPE)
        latent = tl.load(
            cache + where[:, None] + r[None, :],
            mask=known[:, None] & (r < RANK)[None, :],
            other=0.0,
        )
        shared = tl.load(
            cache + where[:, None] + RANK + p[None, :],
            mask=known[:, None] & (p < ROPE)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(latent), input_precision="tf32x3")
        scores += tl.dot(rotated, tl.trans(shared), input_precision="tf32x3")
        visible = known[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        # Avoid -inf - -inf, which is NaN, in a row that has seen no key yet.
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(highest - base)
        acc = acc * rescale[:, None]
        acc += tl.dot(weights.to(latent.dtype), latent, input_precision="tf32x3")
        total = total * rescale + tl.sum(weights, 1)
        highest = now
    place = split.to(tl.int64) * num_tokens * HEADS + pair
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(partial_lse + place, highest + tl.log2(total), mask=exists)
    acc = acc / total[:, None]
    tl.store(
        partial_out + place[:, None] * RANK + r[None, :],
        acc.to(partial_out.dtype.element_ty),
        mask=exists[:, None] & (r < RANK)[None, :],
    )


_launch_attend = launcher(_attend_kernel)


@triton.jit(do_not_specialize=["rows", "has_plan", "num_tokens", "splits"])
def _merge_kernel(
    partial_out,
    partial_lse,
    merged,  # [tokens, heads, RANK]
    query_start_loc,
    expansion,  # as of `_project_kernel`
    rows,
    has_plan,
    num_tokens,
    heads,
    splits,
    RANK: tl.constexpr,
    R: tl.constexpr,
):
    """Join the splits of one token and head by their log-sum-exp, in order."""
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(query_start_loc + rows):
        return
    if tl.load(expansion + rows + 1 + token, mask=has_plan > 0, other=0) > 0:
        return
    pair = token * heads + tl.program_id(1)
    r = tl.arange(0, R)
    acc = tl.zeros([R], dtype=tl.float32)
    highest = float("-inf")
    total = 0.0
    for split in range(splits):
        place = split * num_tokens.to(tl.int64) * heads + pair
        lse = tl.load(partial_lse + place)
        now = tl.maximum(highest, lse)
        # The first split of a token always has a key.
        weight = tl.exp2(lse - now)
        rescale = tl.exp2(highest - now)
        part = tl.load(partial_out + place * RANK + r, mask=r < RANK, other=0.0)
        acc = acc * rescale + part * weight
        total = total * rescale + weight
        highest = now
    result = (acc / total).to(merged.dtype.element_ty)
    tl.store(merged + pair * RANK + r, result, mask=r < RANK)


_launch_merge = launcher(_merge_kernel)


@LatentAttention.taking_flat
def run(call: LatentAttention) -> None:
    """Launch the kernels."""
    query, latent, cache, up, out = call.query, call.latent, call.cache, call.up, call.out
    block_tables, query_start_loc, seq_lens = call.block_tables, call.query_start_loc, call.seq_lens
    tokens, heads, _ = query.shape
    width, value, rows = cache.shape[2], out.shape[2], len(block_tables)
    if tokens == 0:
        return
    grid = (tokens, ceil_div(max(width, heads * value), _COPIED))
    _launch_write(
        grid,
        latent, cache, call.slot_mapping, out, query_start_loc, latent.stride(0), rows, width,
        heads * value, BLOCK=_COPIED,
    )  # fmt: skip
    if rows == 0 or call.max_seq_len == 0:
        return
    expansion = None if call.deterministic else call.expansion
    of_rows = (cache, up, block_tables, query_start_loc, seq_lens, out, call.scale)
    _absorb(query, *of_rows, expansion, deterministic=call.deterministic)
    if expansion is not None:
        # Behind the other rows, whose memory it takes over.
        latent_expanded.run(query, *of_rows, expansion, call.expanded_keys)


def _absorb(
    query: Tensor,
    cache: Tensor,
    up: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    scale: float,
    expansion: Tensor | None,
    *,
    deterministic: bool,
) -> None:
    """Attend for the rows that are not expanded."""
    tokens, heads, query_dim = query.shape
    block_size = cache.shape[1]
    rank, value, rows = up.shape[2], out.shape[2], len(block_tables)
    nope = up.shape[1] - value
    # One variant of each kernel serves steps with a plan and without.
    plan = (query_start_loc, 0) if expansion is None else (expansion, 1)
    absorbed = query.new_empty((tokens, heads, rank))
    _project(query, up[:, :nope], absorbed, query_start_loc, plan, is_transposed=True)
    tile = tile_of(capability_of(query.device), query.element_size(), rank, query_dim - nope)
    tiles = tokens * heads // tile.packed + rows
    splits = splits_of(tiles, query.device, deterministic=deterministic)
    partial_out = absorbed  # A program reads no more of it than it writes.
    if splits > 1:
        partial_out = query.new_empty((splits, tokens, heads, rank), dtype=torch.float32)
    partial_lse = query.new_empty((splits, tokens, heads), dtype=torch.float32)
    padded = max(16, next_power_of_2(rank))
    marks, has_plan = plan
    _launch_attend(
        (tiles, splits),
        absorbed, query, cache, block_tables, query_start_loc, seq_lens, marks, partial_out,
        partial_lse, query.stride(0), block_tables.stride(0), rows, has_plan, tokens,
        scale * LOG2_E, HEADS=heads,
        NOPE=nope, ROPE=query_dim - nope, RANK=rank, BLOCK_SIZE=block_size,
        M=tile.packed, N=tile.keys, R=padded, P=max(16, next_power_of_2(query_dim - nope)),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        _launch_merge(
            (tokens, heads),
            partial_out, partial_lse, absorbed, query_start_loc, marks, rows, has_plan, tokens,
            heads, splits, RANK=rank, R=padded, num_warps=1,
        )  # fmt: skip
    _project(absorbed, up[:, nope:], out, query_start_loc, plan, is_transposed=False)


def tile_of(capability: int, size: int, rank: int, rope: int) -> Tile:
    """The tile for elements of `size` bytes.

    What was measured is for vectors as DeepSeek has them; larger ones take smaller tiles.
    """
    is_large = next_power_of_2(rank) > 512 or next_power_of_2(rope) > 64
    return of_capability(_TILES, 0 if is_large else capability, size)


def splits_of(tiles: int, device: torch.device, *, deterministic: bool) -> int:
    """Into how many parts the keys of a tile are cut; 1 where tiles fill the GPU."""
    return 1 if deterministic else min(64, max(1, 2 * multiprocessors(device) // tiles))


def _project(
    x: Tensor,
    weight: Tensor,
    to: Tensor,
    query_start_loc: Tensor,
    plan: tuple[Tensor, int],
    *,
    is_transposed: bool,
) -> None:
    """Multiply each head's numbers by its matrix [outputs, inputs], or [inputs, outputs]."""
    tokens, heads, outputs = to.shape
    w_output, w_input = weight.stride()[1:]
    inputs = weight.shape[1] if is_transposed else weight.shape[2]
    if is_transposed:
        w_output, w_input = w_input, w_output
    grid = (ceil_div(tokens, _PROJECTED), heads, ceil_div(outputs, 64))
    _launch_project(
        grid,
        x, weight, to, query_start_loc, plan[0], len(query_start_loc) - 1, plan[1], x.stride(0),
        x.stride(1), weight.stride(0), w_output, w_input, to.stride(0), to.stride(1),
        INPUTS=inputs, OUTPUTS=outputs, M=_PROJECTED, N=64, K=32, num_warps=4, num_stages=3,
    )  # fmt: skip
