# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Rows of codes in a paged cache (`src.ops.attention.cached_rows`), as kernels read and write them.

CODES is 0 for caches without codes, 1 for int8 and 2 for float8_e4m3. Both are bytes here: not
every GPU converts the latter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from src.ops.attention.cached_rows import is_coded, kind_of
from src.ops.launching_triton import ceil_div, launcher, next_power_of_2


def as_stored(cache: Tensor) -> tuple[Tensor, int]:
    """A cache as kernels take it, and its CODES."""
    if not is_coded(cache.dtype):
        return cache, 0
    return cache.view(torch.int8), kind_of(cache.dtype)


@triton.jit
def numbers_of(codes, like, SORT: tl.constexpr):
    """Codes in the dtype of `like`, exactly, but for the factor that `load_factors` gives."""
    if SORT == 1:
        wide = codes.to(tl.float32)
    else:
        # A half with the same bits at the top is the number / 256.
        word = codes.to(tl.uint8, bitcast=True).to(tl.uint16)
        half = ((word & 0x7F) << 7) | ((word & 0x80) << 8)
        wide = half.to(tl.float16, bitcast=True).to(tl.float32)
    return wide.to(like.dtype)


@triton.jit
def load_factors(cache, rows, stored, SORT: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The factors of rows; 0 where not `stored`."""
    places = (cache + rows + HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True)
    factors = tl.load(places, mask=stored, other=0.0)
    if SORT == 2:
        factors = factors * 256.0
    return factors


@triton.jit
def factors_of(largest, nans, SORT: tl.constexpr):
    """Factors of rows with these largest magnitudes and numbers of NaNs."""
    limit = 127.0 if SORT == 1 else 448.0
    return tl.where(nans > 0, float("nan"), tl.div_rn(largest, tl.zeros_like(largest) + limit))


@triton.jit
def codes_of(x, factors, SORT: tl.constexpr):
    """Codes, int8, of numbers [N, D] of rows with factors [N]."""
    limit = 127.0 if SORT == 1 else 448.0
    usable = (factors > 0.0) & (factors < float("inf"))
    by = tl.where(usable, factors, 1.0)[:, None] + tl.zeros_like(x)
    x = tl.where(usable[:, None], tl.div_rn(x, by), 0.0)
    x = tl.minimum(tl.maximum(x, -limit), limit)
    if SORT == 1:
        # 1.5 * 2**23: adding it rounds to an integer, ties to even.
        codes = ((x + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        word = x.to(tl.uint32, bitcast=True)
        bits = word & 0x7FFFFFFF
        # Numbers below 2**-6 are multiples of 2**-9, the distance of floats from 2**14 on.
        shifted = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True)
        large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        code = tl.where(bits < 0x3C800000, shifted - 0x46800000, large) | ((word >> 24) & 0x80)
        codes = code.to(tl.uint8).to(tl.int8, bitcast=True)
    return codes


@triton.jit
def store_factors(cache, rows, factors, stored, HEAD_DIM: tl.constexpr):
    """Write the factors of rows."""
    places = (cache + rows + HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(places, factors, mask=stored)


@triton.jit(do_not_specialize=["slot_mapping"])
def _write_codes_kernel(
    key,  # [tokens, kv_heads, HEAD_DIM], rows key_stride apart
    value,
    key_cache,  # [slots, kv_heads, HEAD_DIM + 4]
    value_cache,
    slot_mapping,  # [tokens] int64, token -> slot, -1 = none
    key_stride,
    value_stride,
    kv_heads,
    SORT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
):
    """Store HEADS rows of a token: the first programs have keys, the others values."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        tiles = tl.cdiv(kv_heads, HEADS)
        head = tile % tiles * HEADS + tl.arange(0, HEADS)
        d = tl.arange(0, D)
        exists = head < kv_heads
        mask = exists[:, None] & (d < HEAD_DIM)[None, :]
        at = head[:, None] * HEAD_DIM + d[None, :]
        rows = (slot * kv_heads + head) * (HEAD_DIM + 4)
        if tile < tiles:
            x = tl.load(key + token * key_stride + at, mask=mask, other=0.0).to(tl.float32)
            _store_rows(key_cache, rows, x, exists, mask, SORT, HEAD_DIM, D)
        else:
            x = tl.load(value + token * value_stride + at, mask=mask, other=0.0).to(tl.float32)
            _store_rows(value_cache, rows, x, exists, mask, SORT, HEAD_DIM, D)


_launch_write_codes = launcher(_write_codes_kernel)


@triton.jit
def _store_rows(
    cache, rows, x, exists, mask, SORT: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr
):
    factors = factors_of(tl.max(tl.abs(x), 1), tl.sum((x != x).to(tl.int32), 1), SORT)
    tl.store(
        cache + rows[:, None] + tl.arange(0, D)[None, :], codes_of(x, factors, SORT), mask=mask
    )
    store_factors(cache, rows, factors, exists, HEAD_DIM)


def write_codes(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    sort: int,
) -> None:
    """Write keys and values [tokens, kv_heads, head_dim] into their slots, as codes."""
    tokens, kv_heads, head_dim = key.shape
    padded = next_power_of_2(head_dim)
    heads = min(next_power_of_2(kv_heads), max(1, 1024 // padded))
    _launch_write_codes(
        (tokens, 2 * ceil_div(kv_heads, heads)),
        key, value, key_cache, value_cache, slot_mapping, key.stride(0), value.stride(0), kv_heads,
        SORT=sort, HEAD_DIM=head_dim, HEADS=heads, D=padded,
    )  # fmt: skip
