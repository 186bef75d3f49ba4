# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Paged attention for CUDA devices: cache write, varlen prefill, split-KV decode with a merge.

Rows with one query token take the decode kernel, whose splits have a fixed size, the others the
prefill kernel: which one serves a row, and how its keys are grouped, depends on that row alone.
Where not even that may show, all take the prefill kernel, in tiles of one size.
Grids come from tensor sizes and from the host integers `max_query_len` and `max_seq_len`, never
from device data, so a launch needs no sync and can be captured in a CUDA graph.

Flash attention (T. Dao, 2023, "FlashAttention-2"); flash decoding (T. Dao et al., 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KV_SPLIT = 512
"""Keys of one decode split. Fixed, so that a row's result does not depend on its batch."""

_LOG2_E = 1.4426950408889634


@triton.jit
def _write_cache_kernel(
    key,  # [tokens, kv_heads, head_dim], rows key_stride apart
    value,
    key_cache,  # [blocks, block_size, kv_heads, head_dim]
    value_cache,
    slot_mapping,  # [tokens] int64, token -> slot, -1 = none
    out,  # [tokens, heads, head_dim]
    query_start_loc,  # [rows + 1] int32
    key_stride,
    value_stride,
    rows,
    kv_width,  # kv_heads * head_dim
    out_width,  # heads * head_dim
    BLOCK: tl.constexpr,
):
    """Store a token's keys and values; a padding token gets a zero output instead."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping + token)
    # A scalar condition is put into the bound: the interpreter of newer Tritons takes no mask that
    # was combined with one.
    written = offsets < tl.where(slot >= 0, kv_width, 0)
    k = tl.load(key + token * key_stride + offsets, mask=written)
    v = tl.load(value + token * value_stride + offsets, mask=written)
    tl.store(key_cache + slot * kv_width + offsets, k, mask=written)
    tl.store(value_cache + slot * kv_width + offsets, v, mask=written)
    padding = token >= tl.load(query_start_loc + rows)
    zeros = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    tl.store(
        out + token * out_width + offsets, zeros, mask=offsets < tl.where(padding, out_width, 0)
    )


@triton.jit
def _attend(
    q,  # [M, D]
    positions,  # [M] position of each packed query row
    begin,
    end,
    table,
    key_cache,
    value_cache,
    kv_head,
    token_stride,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Online softmax over keys [begin, end): accumulator [M, D], maximum (base 2) [M], sum [M]."""
    acc = tl.zeros([M, D], dtype=tl.float32)
    highest = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    d = tl.arange(0, D)
    for start in range(begin // N * N, end, N):
        keys = start + tl.arange(0, N)
        in_range = (keys >= begin) & (keys < end)
        block = tl.load(table + keys // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
        rows = (block * BLOCK_SIZE + keys % BLOCK_SIZE) * token_stride + kv_head * HEAD_DIM
        k = tl.load(
            key_cache + rows[None, :] + d[:, None],
            mask=in_range[None, :] & (d < HEAD_DIM)[:, None],
            other=0.0,
        )  # [D, N]
        scores = tl.dot(q, k, input_precision="tf32x3") * scale_log2
        visible = in_range[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen no key yet: -inf - -inf would be NaN.
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(highest - base)
        v = tl.load(
            value_cache + rows[:, None] + d[None, :],
            mask=in_range[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )  # [N, D]
        acc = acc * rescale[:, None]
        acc += tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        total = total * rescale + tl.sum(weights, 1)
        highest = now
    return acc, highest, total


@triton.jit
def _prefill_kernel(
    query,  # [tokens, heads, head_dim], rows query_stride apart
    key_cache,
    value_cache,
    block_tables,  # [rows, table_stride] int32
    query_start_loc,  # [rows + 1] int32
    seq_lens,  # [rows] int32
    out,  # [tokens, heads, head_dim]
    query_stride,
    table_stride,
    token_stride,
    rows,
    heads,
    scale_log2,
    FEWEST: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """One tile of M packed query rows (token-major, head-minor) of one row and kv head.

    Rows with fewer than FEWEST query tokens are left to the decode kernel.

    Tile i belongs to the row b with first[b] <= i < first[b + 1], where first[b] =
    query_start_loc[b] * GROUP // M + b leaves at least ceil(query_len * GROUP / M) tiles a row.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) * GROUP // M + middle <= tile:
            low = middle
        else:
            high = middle
    row = low
    begin = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - begin
    first = (tile - (begin * GROUP // M + row)) * M
    if query_len < FEWEST or first >= query_len * GROUP:
        return
    seq_len = tl.load(seq_lens + row)
    packed = first + tl.arange(0, M)
    exists = packed < query_len * GROUP
    offset = packed // GROUP
    positions = seq_len - query_len + offset
    token = (begin + offset).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    d = tl.arange(0, D)
    mask = exists[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(
        query + (token * query_stride + head * HEAD_DIM)[:, None] + d[None, :], mask=mask, other=0.0
    )
    first_position = seq_len - query_len + first // GROUP
    last_offset = tl.minimum((first + M - 1) // GROUP, query_len - 1)
    keys_begin = 0
    if WINDOW > 0:
        keys_begin = tl.maximum(first_position - WINDOW + 1, 0)
    acc, _, total = _attend(
        q, positions, keys_begin, seq_len - query_len + last_offset + 1,
        block_tables + row.to(tl.int64) * table_stride, key_cache, value_cache, kv_head,
        token_stride, scale_log2, HEAD_DIM, BLOCK_SIZE, WINDOW, M, N, D,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    where = (token * heads + head) * HEAD_DIM
    tl.store(out + where[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _decode_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_start_loc,
    seq_lens,
    partial_out,  # [rows, heads, splits, D] float32, normalised inside its split
    partial_lse,  # [rows, heads, splits] float32, log2 of the split's sum
    query_stride,
    table_stride,
    token_stride,
    heads,
    splits,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """One split of the keys for all query heads of one kv head of a row with one token."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start_loc + row).to(tl.int64)
    query_len = tl.load(query_start_loc + row + 1) - token
    seq_len = tl.load(seq_lens + row)
    begin = split * SPLIT
    if WINDOW > 0:
        begin = tl.maximum(begin, seq_len - WINDOW)
    end = tl.minimum((split + 1) * SPLIT, seq_len)
    if query_len != 1 or begin >= end:
        return
    packed = tl.arange(0, M)
    exists = packed < GROUP
    head = kv_head * GROUP + packed
    d = tl.arange(0, D)
    mask = exists[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(
        query + token * query_stride + (head * HEAD_DIM)[:, None] + d[None, :], mask=mask, other=0.0
    )
    positions = tl.zeros([M], dtype=tl.int32) + seq_len - 1
    acc, highest, total = _attend(
        q, positions, begin, end, block_tables + row.to(tl.int64) * table_stride, key_cache,
        value_cache, kv_head, token_stride, scale_log2, HEAD_DIM, BLOCK_SIZE, WINDOW, M, N, D,
    )  # fmt: skip
    at = (row.to(tl.int64) * heads + head) * splits + split
    tl.store(partial_lse + at, highest + tl.log2(total), mask=exists)
    tl.store(
        partial_out + (at * D)[:, None] + d[None, :], acc / total[:, None], mask=exists[:, None]
    )


@triton.jit
def _merge_kernel(
    partial_out,
    partial_lse,
    query_start_loc,
    seq_lens,
    out,
    heads,
    splits,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    D: tl.constexpr,
):
    """Log-sum-exp merge of a row's splits, in their order."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_loc + row).to(tl.int64)
    query_len = tl.load(query_start_loc + row + 1) - token
    if query_len != 1:
        return
    seq_len = tl.load(seq_lens + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // SPLIT
    base = (row.to(tl.int64) * heads + head) * splits
    d = tl.arange(0, D)
    acc = tl.zeros([D], dtype=tl.float32)
    highest = float("-inf")
    total = 0.0
    for split in range(first, (seq_len + SPLIT - 1) // SPLIT):
        lse = tl.load(partial_lse + base + split)
        now = tl.maximum(highest, lse)
        rescale = tl.exp2(highest - now)
        weight = tl.exp2(lse - now)
        acc = acc * rescale + weight * tl.load(partial_out + (base + split) * D + d)
        total = total * rescale + weight
        highest = now
    result = (acc / total).to(out.dtype.element_ty)
    tl.store(out + (token * heads + head) * HEAD_DIM + d, result, mask=d < HEAD_DIM)


def prefill_shape(padded: int, element_size: int, packed: int) -> tuple[int, int, int]:
    """Rows of a prefill tile, warps and pipeline stages that fit into Hopper's shared memory.

    Parameters
        padded: head_dim rounded up to a power of two.
        element_size: Bytes of an element.
        packed: Packed query rows of the whole batch; few do not fill large tiles.
    """
    if element_size == 4:
        return 64, 4, 1
    return (128, 8, 2) if padded <= 128 and packed > 1024 else (64, 4, 2)


def decode_stages(element_size: int) -> int:
    """Pipeline stages of the decode kernel."""
    return 3 if element_size == 2 else 2


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    out: Tensor,
    scale: float,
    sliding_window: int,
    max_query_len: int,
    max_seq_len: int,
    deterministic: bool = False,
) -> None:
    """Launch the kernels; arguments as in [`paged_attention`][src.ops.paged_attention]."""
    tokens, heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    rows = block_tables.shape[0]
    if tokens == 0:
        return
    group = heads // kv_heads
    kv_width, out_width = kv_heads * head_dim, heads * head_dim
    copy = 1024
    _write_cache_kernel[(tokens, triton.cdiv(max(kv_width, out_width), copy))](
        key, value, key_cache, value_cache, slot_mapping, out, query_start_loc,
        key.stride(0), value.stride(0), rows, kv_width, out_width, BLOCK=copy,
    )  # fmt: skip
    if rows == 0 or max_seq_len == 0:
        return
    padded = max(16, triton.next_power_of_2(head_dim))
    keys = 64 if padded <= 128 else 32
    shared = {
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": sliding_window,
        "GROUP": group,
        "D": padded,
        "N": keys,
    }
    scale_log2 = scale * _LOG2_E
    if not deterministic:
        _run_decode(
            query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, out, scale_log2,
            max_seq_len, shared,
        )  # fmt: skip
    if max_query_len > 1 or deterministic:
        packed = 0 if deterministic else tokens * group
        tile, warps, stages = prefill_shape(padded, query.element_size(), packed)
        _prefill_kernel[(tokens * group // tile + rows, kv_heads)](
            query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, out,
            query.stride(0), block_tables.stride(0), kv_width, rows, heads, scale_log2,
            FEWEST=1 if deterministic else 2, M=tile, **shared, num_warps=warps, num_stages=stages,
        )  # fmt: skip


def _run_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    scale_log2: float,
    max_seq_len: int,
    shared: dict[str, int],
) -> None:
    """Rows with one query token; `shared` are the constants of both kernels that attend."""
    heads, head_dim = query.shape[1:]
    rows, (kv_heads, _) = len(block_tables), key_cache.shape[2:]
    window, group, padded = shared["WINDOW"], shared["GROUP"], shared["D"]
    splits = triton.cdiv(max_seq_len, KV_SPLIT)
    partial_out = torch.empty(
        (rows, heads, splits, padded), dtype=torch.float32, device=query.device
    )
    partial_lse = torch.empty((rows, heads, splits), dtype=torch.float32, device=query.device)
    _decode_kernel[(rows, kv_heads, splits)](
        query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, partial_out,
        partial_lse, query.stride(0), block_tables.stride(0), kv_heads * head_dim, heads, splits,
        scale_log2, SPLIT=KV_SPLIT, M=max(16, triton.next_power_of_2(group)), **shared, num_warps=4,
        num_stages=decode_stages(query.element_size()),
    )  # fmt: skip
    _merge_kernel[(rows, heads)](
        partial_out, partial_lse, query_start_loc, seq_lens, out, heads, splits,
        HEAD_DIM=head_dim, WINDOW=window, SPLIT=KV_SPLIT, D=padded, num_warps=1,
    )  # fmt: skip
