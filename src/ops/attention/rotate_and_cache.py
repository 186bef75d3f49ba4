"""Steps before attention, on the fused QKV projection: norms, RoPE and the cache write.

Queries are rotated in place. Keys and values are written only into the paged cache, where
`paged_attention`, called without `key` and `value`, finds them. The roundings are exactly those of
`src.models.layers`: normalise in float32, round, multiply by the weight; round cosines and sines;
round each product before it is added.

RoPE: Su et al., "RoFormer" (2021). Norms of queries and keys: M. Dehghani et al., "Scaling Vision
Transformers to 22 Billion Parameters" (2023), section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from src.ops.attention.cached_rows import CODES, is_coded, row_size, write_rows
from src.ops.declaration import Case, Cost, Op
from src.ops.records import ANY, Record, number, tensor

_POSITIONS = 64
"""Rows of the RoPE table in the cases."""


class RotateAndCache(Record):
    """Rotate queries in place; write rotated keys and values into the paged cache.

    `query`, `key` and `value` are float32, bfloat16 or float16, and may be slices of one fused
    projection: the last dimension is contiguous, heads are D apart, the row stride is free. Call it
    outside of compiled functions: when traced, it would be surrounded by copies of the projection.

    A token whose slot is -1 is padding. Its query is left unchanged, nothing is written to the
    cache, and its row of `out` is set to 0. (`paged_attention` without keys does not do that.)

    Attributes
    ----------
    query
        [T, num_heads, D], D even, changed in place.
    key
        [T, num_kv_heads, D], not changed.
    value
        [T, num_kv_heads, D].
    q_norm
        [D] in `query`'s dtype, the weight of an RMS norm over each head; None for none.
    k_norm
        The same for keys.
    eps
        Added to the mean square.
    rope_table
        float32 [max_positions, D]: row p has D/2 cosines, then D/2 sines of position p.
    positions
        [T] int64, token -> row of the RoPE table; not read for padding.
    slot_mapping
        [T] int64, token -> block * block_size + offset, or -1.
    key_cache
        [num_blocks, block_size, num_kv_heads, D], contiguous, changed in place.
    value_cache
        Like `key_cache`.
    out
        [T, num_heads, D], contiguous, the output of the attention that follows. Only rows of
        padding are changed.
    """

    query: Tensor = tensor("tokens num_heads head_dim", rows=True, changed=True)
    key: Tensor = tensor("tokens num_kv_heads head_dim", rows=True)
    value: Tensor = tensor("tokens num_kv_heads head_dim", rows=True)
    q_norm: Tensor | None = tensor("head_dim")
    k_norm: Tensor | None = tensor("head_dim")
    eps: float = number()
    rope_table: Tensor = tensor("max_positions head_dim", torch.float32)
    positions: Tensor = tensor("tokens", torch.int64)
    slot_mapping: Tensor = tensor("tokens", torch.int64)
    key_cache: Tensor = tensor("num_blocks block_size num_kv_heads _", ANY, changed=True)
    value_cache: Tensor = tensor("num_blocks block_size num_kv_heads _", ANY, changed=True)
    out: Tensor = tensor("tokens num_heads head_dim", changed=True)


def reference(call: RotateAndCache) -> None:
    """See `RotateAndCache`."""
    query, slot_mapping = call.query, call.slot_mapping
    exists = slot_mapping >= 0  # [T] bool, token index -> is not padding
    slots = slot_mapping[exists]
    cos_sin = call.rope_table[call.positions[exists]].to(query.dtype)
    query[exists] = _rotated(query[exists], call.q_norm, call.eps, cos_sin)
    rotated = _rotated(call.key[exists], call.k_norm, call.eps, cos_sin)
    write_rows(rotated, call.key_cache, slots)
    write_rows(call.value[exists], call.value_cache, slots)
    call.out[~exists] = 0


def _rotated(x: Tensor, norm: Tensor | None, eps: float, cos_sin: Tensor) -> Tensor:
    """Rotate heads [T, heads, D] by angles [T, D]; normalise each first if `norm` is given."""
    if norm is not None:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        x = norm * (wide * scale).to(x.dtype)
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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
) -> RotateAndCache:
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
    return RotateAndCache(
        query=query,
        key=key,
        value=value,
        q_norm=norms[0] if has_norms else None,
        k_norm=norms[1] if has_norms else None,
        eps=1e-6,
        rope_table=table.to(device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        key_cache=caches[0].to(device),
        value_cache=caches[1].to(device),
        out=torch.full((total, num_heads, head_dim), torch.nan, dtype=dtype).to(device),
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
        for kept_as in CODES
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for head_dim in (8, 64, 72, 256)
    ]
    cases += [
        {"cache_dtype": kept_as, "num_heads": 71, "num_kv_heads": 1, "has_norms": False}
        for kept_as in CODES
    ]
    return cases


def _cost(call: RotateAndCache) -> Cost:
    """All data read and written once; per element, rotation takes 3 FLOPs and a norm takes 4."""
    query, key = call.query, call.key
    moved = 2 * query.element_size() * (query.numel() + key.numel() + call.value.numel())
    angles = len(call.positions) * call.rope_table.shape[1] * call.rope_table.element_size()
    flops = sum(
        x.numel() * (3 if norm is None else 7)
        for x, norm in ((query, call.q_norm), (key, call.k_norm))
    )
    return Cost(bytes=moved + angles, flops=flops)


ROTATE_AND_CACHE = Op(
    "rotate_and_cache",
    RotateAndCache,
    reference=reference,
    build=_build,
    cases=_grid(),
    cost=_cost,
    lazy={"cuda": "src.ops.attention.rotate_and_cache_triton:run"},
)

rotate_and_cache = ROTATE_AND_CACHE.function
"""The op as a function of its record's fields: of `RotateAndCache`."""
