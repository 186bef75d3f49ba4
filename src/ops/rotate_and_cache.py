"""Steps before attention, on the fused QKV projection: norms, RoPE and the cache write.

Queries are rotated in place. Keys and values are written only into the paged cache, where
[`paged_attention`][src.ops.paged_attention.paged_attention], called without `key` and `value`,
finds them. The roundings are exactly those of `src.models.layers`: normalise in float32, round,
multiply by the weight; round cosines and sines; round each product before it is added.

RoPE: Su et al., "RoFormer" (2021). Norms of queries and keys: M. Dehghani et al., "Scaling Vision
Transformers to 22 Billion Parameters" (2023), section 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.ops.cached_rows import LARGEST_CODE, is_coded, row_size, write_rows
from src.ops.declaration import Case, Cost, Op

_POSITIONS = 64
"""Rows of the RoPE table in the cases."""


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope_table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
) -> None:
    """See [`rotate_and_cache`][src.ops.rotate_and_cache.rotate_and_cache]."""
    exists = slot_mapping >= 0  # [T] bool, token index -> is not padding
    slots = slot_mapping[exists]
    cos_sin = rope_table[positions[exists]].to(query.dtype)
    query[exists] = _rotated(query[exists], q_norm, eps, cos_sin)
    write_rows(_rotated(key[exists], k_norm, eps, cos_sin), key_cache, slots)
    write_rows(value[exists], value_cache, slots)
    out[~exists] = 0


def _rotated(x: Tensor, norm: Tensor | None, eps: float, cos_sin: Tensor) -> Tensor:
    """Rotate heads [T, heads, D] by angles [T, D]; normalise each first if `norm` is given."""
    if norm is not None:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        x = norm * (wide * scale).to(x.dtype)
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _fake(*args: object) -> None:
    return None


def _build(
    device: str,
    *,
    tokens: int = 7,
    padding: int = 0,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    has_norms: bool = True,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Slices of one fused tensor, slots in random order, NaN wherever nothing may be read.

    A `cache_dtype` of None is `dtype`.
    """
    random = torch.Generator().manual_seed(seed)
    total, heads = tokens + padding, (num_heads, num_kv_heads, num_kv_heads)
    fused = torch.randn(total, sum(heads), head_dim, generator=random)
    fused[tokens:] = torch.nan
    query, key, value = (
        fused.to(device, dtype).flatten(1).unflatten(1, (-1, head_dim)).split(heads, dim=1)
    )
    positions = torch.randint(1, _POSITIONS, (total,), generator=random)
    positions[tokens:] = 0
    angles = torch.rand(_POSITIONS, head_dim // 2, generator=random) * 2 * torch.pi
    table = torch.full((_POSITIONS, head_dim), torch.nan)
    read = positions[:tokens]
    table[read] = torch.cat((angles.cos(), angles.sin()), dim=-1)[read]
    num_blocks = -(-tokens // block_size) + 2
    slots = torch.full((total,), -1)
    slots[:tokens] = torch.randperm(num_blocks * block_size, generator=random)[:tokens]
    kept_as = cache_dtype or dtype
    shape = (num_blocks, block_size, num_kv_heads, row_size(head_dim, kept_as))
    caches = [
        torch.full(shape, 255, dtype=torch.uint8).view(kept_as)
        if is_coded(kept_as)
        else torch.full(shape, torch.nan, dtype=kept_as)
        for _ in range(2)
    ]
    norms = [(1 + torch.randn(head_dim, generator=random) / 10).to(device, dtype) for _ in range(2)]
    return (
        query,
        key,
        value,
        *(norms if has_norms else (None, None)),
        1e-6,
        table.to(device),
        positions.to(device),
        slots.to(device),
        *(cache.to(device) for cache in caches),
        torch.full((total, num_heads, head_dim), torch.nan, dtype=dtype).to(device),
    )


def _grid() -> list[Case]:
    """Dtypes, head sizes, norms, GQA ratios, block sizes; also no tokens, and only padding."""
    cases: list[Case] = [
        {"dtype": dtype, "head_dim": head_dim, "has_norms": has_norms, "padding": 1}
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for head_dim in (8, 24, 64, 72, 96, 128, 256)
        for has_norms in (False, True)
    ]
    cases += [
        {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "block_size": 5}
        for heads, kv_heads in ((2, 2), (71, 1), (40, 8))
        for head_dim in (16, 128)
    ]
    cases += [{"tokens": 300, "block_size": 1}, {"tokens": 0}, {"tokens": 0, "padding": 3}]
    cases += [
        {"cache_dtype": kept_as, "dtype": dtype, "head_dim": head_dim, "padding": 1}
        for kept_as in LARGEST_CODE
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for head_dim in (8, 64, 72, 256)
    ]
    cases += [
        {"cache_dtype": kept_as, "num_heads": 71, "num_kv_heads": 1, "has_norms": False}
        for kept_as in LARGEST_CODE
    ]
    return cases


def _cost(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope_table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
) -> Cost:
    """All data read and written once; per element, rotation takes 3 FLOPs and a norm takes 4."""
    moved = 2 * query.element_size() * (query.numel() + key.numel() + value.numel())
    angles = len(positions) * rope_table.shape[1] * rope_table.element_size()
    flops = sum(
        x.numel() * (3 if norm is None else 7) for x, norm in ((query, q_norm), (key, k_norm))
    )
    return Cost(bytes=moved + angles, flops=flops)


ROTATE_AND_CACHE = Op(
    "rotate_and_cache",
    "(Tensor(a!) query, Tensor key, Tensor value, Tensor? q_norm, Tensor? k_norm, float eps, "
    "Tensor rope_table, Tensor positions, Tensor slot_mapping, Tensor(b!) key_cache, "
    "Tensor(c!) value_cache, Tensor(d!) out) -> ()",
    reference=reference,
    fake=_fake,
    build=_build,
    cases=_grid(),
    cost=_cost,
    lazy={"cuda": "src.ops.triton.rotate_and_cache:run"},
)


def rotate_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope_table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
) -> None:
    """Rotate queries in place; write rotated keys and values into the paged cache.

    `query`, `key` and `value` are float32, bfloat16 or float16, and may be slices of one fused
    projection: the last dimension is contiguous, heads are D apart, the row stride is free. Call it
    outside of compiled functions: when traced, it would be surrounded by copies of the projection.

    A token whose slot is -1 is padding. Its query is left unchanged, nothing is written to the
    cache, and its row of `out` is set to 0. (`paged_attention` without keys does not do that.)

    Parameters
        query: [T, num_heads, D], D even, changed in place.
        key: [T, num_kv_heads, D], not changed.
        value: [T, num_kv_heads, D].
        q_norm: [D] in `query`'s dtype, the weight of an RMS norm over each head; None for none.
        k_norm: The same for keys.
        eps: Added to the mean square.
        rope_table: float32 [max_positions, D]: row p has D/2 cosines, then D/2 sines of position p.
        positions: [T] int64, token -> row of the RoPE table; not read for padding.
        slot_mapping: [T] int64, token -> block * block_size + offset, or -1.
        key_cache: [num_blocks, block_size, num_kv_heads, D], contiguous, changed in place.
        value_cache: Like `key_cache`.
        out: [T, num_heads, D], contiguous, the output of the attention that follows. Only rows of
            padding are changed.
    """
    ROTATE_AND_CACHE.overload(
        query,
        key,
        value,
        q_norm,
        k_norm,
        eps,
        rope_table,
        positions,
        slot_mapping,
        key_cache,
        value_cache,
        out,
    )
