# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Norms of queries and keys, RoPE and the cache write for CUDA devices, in one launch.

A program handles some heads of one token: queries, keys or values, depending on its number. Values
are rounded wherever torch would round them, and no product is fused with a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from src.ops.attention.cached_rows_triton import as_stored, codes_of, factors_of, store_factors
from src.ops.attention.rotate_and_cache import RotateAndCache
from src.ops.launching_triton import ceil_div, launcher, next_power_of_2

TILE = 1024
"""Elements of the heads that one program handles; at least one head."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Launch options; fusion is off because torch rounds products before adding them."""


@triton.jit
def _rounded(x, like):
    """float32 `x` rounded to the dtype that `like` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _rotated(heads, at, mask, norm, eps, table, HALF: tl.constexpr, PADDED: tl.constexpr):
    """The rotated halves of a token's heads, [heads, PADDED] float32; `table` is its RoPE row."""
    first = tl.load(heads + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads + at + HALF, mask=mask, other=0.0).to(tl.float32)
    i = tl.arange(0, PADDED)
    inside = i < HALF
    if norm is not None:
        mean = tl.sum(first * first + second * second, 1) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        weight = tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)[None, :]
        first = _rounded(weight * _rounded(first * scale, heads), heads)
        weight = tl.load(norm + i + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
        second = _rounded(weight * _rounded(second * scale, heads), heads)
    cos = _rounded(tl.load(table + i, mask=inside, other=0.0), heads)[None, :]
    sin = _rounded(tl.load(table + i + HALF, mask=inside, other=0.0), heads)[None, :]
    return (
        _rounded(first * cos, heads) - _rounded(second * sin, heads),
        _rounded(second * cos, heads) + _rounded(first * sin, heads),
    )


@triton.jit
def _store_codes(
    cache,
    slot,
    head,  # [HEADS, 1]
    kv_heads,
    first,  # [HEADS, PADDED] float32
    second,
    mask,
    SORT: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store halves of rows as codes."""
    one = tl.reshape(head, [HEADS])
    rows = (slot * kv_heads + one) * (2 * HALF + 4)
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
    nans = tl.sum(((first != first) | (second != second)).to(tl.int32), 1)
    factors = factors_of(largest, nans, SORT)
    at = cache + rows[:, None] + tl.arange(0, PADDED)[None, :]
    tl.store(at, codes_of(first, factors, SORT), mask=mask)
    tl.store(at + HALF, codes_of(second, factors, SORT), mask=mask)
    store_factors(cache, rows, factors, one < kv_heads, 2 * HALF)


# `positions` may be a slice of a step's inputs: its alignment must not select another variant.
@triton.jit(do_not_specialize=["slot_mapping", "positions"])
def _rotate_and_cache_kernel(
    query,  # [tokens, heads, 2 * HALF], rows query_stride apart
    key,  # [tokens, kv_heads, 2 * HALF], rows key_stride apart
    value,
    q_norm,  # [2 * HALF], or None
    k_norm,
    rope_table,  # [positions, 2 * HALF] float32
    positions,  # [tokens] int64, token -> row of rope_table
    slot_mapping,  # [tokens] int64, token -> slot, -1 = none
    key_cache,  # [slots, kv_heads, 2 * HALF], or rows of codes
    value_cache,
    out,  # [tokens, heads, 2 * HALF]
    query_stride,
    key_stride,
    value_stride,
    heads,
    kv_heads,
    eps,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    SORT: tl.constexpr,
):
    """Handle HEADS heads of a token: the first tiles are queries, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    query_tiles = tl.cdiv(heads, HEADS)
    kv_tiles = tl.cdiv(kv_heads, HEADS)
    slot = tl.load(slot_mapping + token)
    i = tl.arange(0, PADDED)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    if tile < query_tiles:
        head += tile * HEADS
        at = head * (2 * HALF) + i
        mask = (head < heads) & (i < HALF)
        if slot < 0:
            out += token * heads * (2 * HALF)
            zeros = tl.zeros([HEADS, PADDED], dtype=out.dtype.element_ty)
            tl.store(out + at, zeros, mask=mask)
            tl.store(out + at + HALF, zeros, mask=mask)
        else:
            query += token * query_stride
            table = rope_table + tl.load(positions + token) * (2 * HALF)
            first, second = _rotated(query, at, mask, q_norm, eps, table, HALF, PADDED)
            # All threads must have read the heads before they are overwritten in place.
            tl.debug_barrier()
            tl.store(query + at, first.to(query.dtype.element_ty), mask=mask)
            tl.store(query + at + HALF, second.to(query.dtype.element_ty), mask=mask)
    elif slot >= 0:
        to = slot * kv_heads * (2 * HALF)
        if tile < query_tiles + kv_tiles:
            head += (tile - query_tiles) * HEADS
            at = head * (2 * HALF) + i
            mask = (head < kv_heads) & (i < HALF)
            table = rope_table + tl.load(positions + token) * (2 * HALF)
            key += token * key_stride
            first, second = _rotated(key, at, mask, k_norm, eps, table, HALF, PADDED)
            if SORT > 0:
                first, second = _rounded(first, key), _rounded(second, key)
                _store_codes(
                    key_cache, slot, head, kv_heads, first, second, mask, SORT, HALF, HEADS, PADDED
                )
            else:
                tl.store(key_cache + to + at, first.to(key.dtype.element_ty), mask=mask)
                tl.store(key_cache + to + at + HALF, second.to(key.dtype.element_ty), mask=mask)
        else:
            head += (tile - query_tiles - kv_tiles) * HEADS
            at = head * (2 * HALF) + i
            mask = (head < kv_heads) & (i < HALF)
            value += token * value_stride
            if SORT > 0:
                first = tl.load(value + at, mask=mask, other=0.0).to(tl.float32)
                second = tl.load(value + at + HALF, mask=mask, other=0.0).to(tl.float32)
                _store_codes(
                    value_cache,
                    slot,
                    head,
                    kv_heads,
                    first,
                    second,
                    mask,
                    SORT,
                    HALF,
                    HEADS,
                    PADDED,
                )
            else:
                value_cache += to
                tl.store(value_cache + at, tl.load(value + at, mask=mask), mask=mask)
                tl.store(value_cache + at + HALF, tl.load(value + at + HALF, mask=mask), mask=mask)


_launch_rotate_and_cache = launcher(_rotate_and_cache_kernel)


def constants(head_dim: int, heads: int) -> dict[str, int]:
    """The kernel's constants, for up to `heads` heads of queries or of keys."""
    padded = next_power_of_2(head_dim // 2)
    most = max(1, TILE // (2 * padded))
    return {
        "HALF": head_dim // 2,
        "HEADS": min(most, next_power_of_2(heads)),
        "PADDED": padded,
    }


@RotateAndCache.taking_flat
def run(call: RotateAndCache) -> None:
    """Launch the kernel."""
    query, key, value, out = call.query, call.key, call.value, call.out
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    if tokens == 0:
        return
    fixed = constants(head_dim, max(heads, kv_heads))
    (key_cache, sort), (value_cache, _) = as_stored(call.key_cache), as_stored(call.value_cache)
    tiles = ceil_div(heads, fixed["HEADS"]) + 2 * ceil_div(kv_heads, fixed["HEADS"])
    _launch_rotate_and_cache(
        (tokens, tiles),
        query, key, value, call.q_norm, call.k_norm, call.rope_table, call.positions,
        call.slot_mapping, key_cache, value_cache, out, query.stride(0), key.stride(0),
        value.stride(0), heads, kv_heads, call.eps,
        **fixed, **OPTIONS, SORT=sort,
    )  # fmt: skip
