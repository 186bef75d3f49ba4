# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Paged attention for CUDA devices: cache write and varlen prefill; see also `paged_decode`.

Rows with one query token use the decode kernel, others the prefill kernel. The prefill kernel reads
a row's keys in an order that depends on that row alone. In deterministic mode all rows use the
prefill kernel, with tiles of one size. Grids depend on tensor sizes and on the device, never on
device data. So a launch needs no sync and can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from src.ops.attention import paged_decode_triton as paged_decode
from src.ops.attention.attend_triton import LOG2_E, attend, first_visible, softmax_state, with_sink
from src.ops.attention.cached_rows_triton import as_stored, write_codes
from src.ops.attention.call import PagedAttention
from src.ops.attention.decode_schedule import decode_schedule
from src.ops.attention.spec import AttentionSpec
from src.ops.launching_triton import ceil_div, launcher, next_power_of_2
from src.ops.tuning import (
    PrefillShape,
    capability_of,
    computed_size,
    decode_shape,
    packed_rows,
    prefill_shape,
)


# As for the schedule's kernels: arguments that vary from step to step select no other variant.
@triton.jit(do_not_specialize=["slot_mapping", "rows"])
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
    """Store a token's keys and values; for a padding token, store zeros in `out` instead."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping + token)
    # The scalar condition is part of the bound, because the interpreter of newer Tritons rejects a
    # mask that combines a scalar with a tensor.
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


_launch_write_cache = launcher(_write_cache_kernel)


@triton.jit(do_not_specialize=["block_tables", "seq_lens", "table_stride", "rows"])
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
    sinks,  # [heads] float32, or None
    FEWEST: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    CAP: tl.constexpr,
    SORT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """One tile of M packed query rows (token-major, head-minor) of one row and kv head.

    Rows with fewer than FEWEST query tokens are left to the decode kernel.

    Tile i belongs to the row b with first[b] <= i < first[b + 1], where first[b] =
    query_start_loc[b] * GROUP // M + b leaves at least ceil(query_len * GROUP / M) tiles a row.
    """
    # A row's last tiles have the most keys, so they start first and do not delay the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
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
    keys_begin = first_visible(first_position, WINDOW, CHUNK)
    table = block_tables + row.to(tl.int64) * table_stride
    acc, highest, total = softmax_state(M, D)
    masked_begin = keys_begin
    if WINDOW + CHUNK == 0:
        # Up to here, every query of the tile sees every key.
        masked_begin = tl.minimum(first_position + 1 + AHEAD, seq_len) // N * N
        acc, highest, total = attend(
            acc, highest, total, q, positions, 0, masked_begin, table, key_cache, value_cache,
            kv_head, token_stride, scale_log2, False, False, 0, 0, 0, CAP, SORT, HEAD_DIM,
            BLOCK_SIZE, N, D,
        )  # fmt: skip
    keys_end = tl.minimum(seq_len - query_len + last_offset + 1 + AHEAD, seq_len)
    acc, highest, total = attend(
        acc, highest, total, q, positions, masked_begin, keys_end,
        table, key_cache, value_cache, kv_head, token_stride, scale_log2, True, True, WINDOW,
        CHUNK, AHEAD, CAP, SORT, HEAD_DIM, BLOCK_SIZE, N, D,
    )  # fmt: skip
    if sinks is not None:
        total = with_sink(total, highest, sinks, head, exists)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    where = (token * heads + head) * HEAD_DIM
    tl.store(out + where[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=mask)


_launch_prefill = launcher(_prefill_kernel)


def launch(call: PagedAttention, *, prefill: Callable[..., None] | None = None) -> None:
    """Launch the kernels.

    Parameters
    ----------
    prefill
        A `Prefill` that serves rows with several query tokens instead of the kernel here.
    """
    query, key, value, spec = call.query, call.key, call.value, call.spec
    block_tables, query_start_loc, seq_lens = call.block_tables, call.query_start_loc, call.seq_lens
    max_query_len, max_seq_len, out = call.max_query_len, call.max_seq_len, call.out
    tokens, heads, head_dim = query.shape
    block_size, kv_heads = call.key_cache.shape[1:3]
    if tokens == 0:
        return
    (key_cache, sort), (value_cache, _) = as_stored(call.key_cache), as_stored(call.value_cache)
    if key is not None and value is not None:
        if sort:
            write_codes(key, value, key_cache, value_cache, call.slot_mapping, sort)
            # Nothing but the output of padding is left to be written.
            key, value = key[:, :0], value[:, :0]
        _write_cache(key, value, key_cache, value_cache, call.slot_mapping, out, query_start_loc)
    if block_tables.shape[0] == 0 or max_seq_len == 0:
        return
    group, padded = heads // kv_heads, max(16, next_power_of_2(head_dim))
    device = capability_of(query.device), padded, computed_size(key_cache)
    rows = (query, key_cache, value_cache, block_tables, query_start_loc, seq_lens)
    if call.deterministic:
        shape = prefill_shape(*device, None)
        _prefill(*rows, out, spec, padded, sort, shape, fewest=1)
        return
    if max_query_len > 1 and prefill is not None:
        # Before the decode kernels, because it may write anything into rows with one query token.
        prefill(*rows, out, spec, max_query_len, max_seq_len)
    decode = decode_shape(*device)
    schedule = call.schedule
    if schedule is None:
        schedule = decode_schedule(
            block_tables, query_start_loc, seq_lens, block_size, spec.window or 0, spec.chunk or 0,
            decode.tile, packed_rows(group) // group,
        )  # fmt: skip
    paged_decode.run(*rows, schedule, out, spec, padded, sort, decode)
    if max_query_len > 1 and prefill is None:
        shape = prefill_shape(*device, tokens * group)
        _prefill(*rows, out, spec, padded, sort, shape, fewest=2)


run = PagedAttention.taking_flat(launch)
"""The kernel of the op."""


def _write_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
) -> None:
    """Write keys and values into their slots, and zeros into `out` for padding."""
    tokens, kv_width, out_width = len(key), key[0].numel(), out[0].numel()
    copy = 1024
    _launch_write_cache(
        (tokens, ceil_div(max(kv_width, out_width), copy)),
        key, value, key_cache, value_cache, slot_mapping, out, query_start_loc,
        key.stride(0), value.stride(0), len(query_start_loc) - 1, kv_width, out_width, BLOCK=copy,
    )  # fmt: skip


def _prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    spec: AttentionSpec,
    padded: int,
    sort: int,
    shape: PrefillShape,
    *,
    fewest: int,
) -> None:
    """Attend for rows with `fewest` query tokens or more."""
    tokens, heads, head_dim = query.shape
    rows, (_, block_size, kv_heads, row) = block_tables.shape[0], key_cache.shape
    group = heads // kv_heads
    _launch_prefill(
        (tokens * group // shape.packed + rows, kv_heads),
        query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, out,
        query.stride(0), block_tables.stride(0), kv_heads * row, rows, heads,
        spec.scale * LOG2_E, spec.sinks,
        FEWEST=fewest, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        WINDOW=spec.window or 0, CHUNK=spec.chunk or 0, AHEAD=spec.ahead or 0,
        CAP=(spec.cap or 0.0) * LOG2_E, SORT=sort, M=shape.packed, N=shape.keys, D=padded,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
