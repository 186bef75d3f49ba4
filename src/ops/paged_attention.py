"""Paged attention: write this step's keys and values into the cache, then attend over it.

One op for prefill chunks, decode and everything between: a batch row is "the next n tokens of a
sequence". The paged cache follows W. Kwon et al., "Efficient Memory Management for Large Language
Model Serving with PagedAttention", SOSP'23.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from src.ops.attention_cases import CASES, build, cost
from src.ops.attention_spec import AttentionSpec
from src.ops.cached_rows import from_rows, is_coded, write_rows
from src.ops.declaration import Op

_REFERENCE_QUERY_TILE = 512
"""Queries that the reference attends at once; this bounds the size of its score matrix."""


def reference(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    out: Tensor,
    sinks: Tensor | None,
    scalars: Sequence[float],
    max_query_len: int,
    max_seq_len: int,
    deterministic: bool = False,
    schedule: Tensor | None = None,
) -> None:
    """See [`paged_attention`][src.ops.paged_attention.paged_attention]."""
    spec = AttentionSpec.of(sinks, scalars)
    starts = query_start_loc.tolist()
    if key is not None and value is not None:
        _write_cache(key, key_cache, slot_mapping)
        _write_cache(value, value_cache, slot_mapping)
        out[starts[-1] :] = 0
    for row, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        for tile in range(begin, end, _REFERENCE_QUERY_TILE):
            tile_end = min(tile + _REFERENCE_QUERY_TILE, end)
            out[tile:tile_end] = _attend(
                query[tile:tile_end],
                key_cache,
                value_cache,
                block_tables[row],
                first_position=seq_len - (end - tile),
                spec=spec,
            )


def _write_cache(new: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Put token t of `new` ([T, kv_heads, head_dim]) into slot `slot_mapping[t]`, -1 nowhere."""
    written = slot_mapping >= 0  # [T] bool, token index -> is not padding
    write_rows(new[written], cache, slot_mapping[written])


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    *,
    first_position: int,
    spec: AttentionSpec,
) -> Tensor:
    """Attention of consecutive tokens of one row, [Q, heads, head_dim] in `query`'s dtype."""
    num_queries, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    end = first_position + num_queries
    first_key = spec.first_visible(first_position)
    first_block = first_key // block_size
    blocks = block_table[first_block : -(-end // block_size)].long()
    skipped = first_block * block_size

    def gather(cache: Tensor) -> Tensor:  # [kv_heads, keys, head_dim] float32
        octets = cache.view(torch.uint8) if is_coded(cache.dtype) else cache
        rows = octets[blocks].flatten(0, 1)[first_key - skipped : end - skipped].view(cache.dtype)
        return from_rows(rows).transpose(0, 1)

    # [kv_heads, group, Q, head_dim] float32: query head h reads key/value head h // group
    grouped = query.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    positions = torch.arange(first_position, end, device=query.device)[:, None]
    keys = torch.arange(first_key, end, device=query.device)[None, :]
    visible = keys <= positions  # [Q, keys] bool
    if spec.window is not None:
        visible &= keys > positions - spec.window
    if spec.chunk is not None:
        visible &= keys >= positions // spec.chunk * spec.chunk
    scores = (grouped * spec.scale) @ gather(key_cache).transpose(1, 2)[:, None]
    if spec.cap is not None:
        scores = (scores / spec.cap).tanh_() * spec.cap
    weights = _softmax(scores.masked_fill_(~visible, -torch.inf), spec.sinks)
    attended = weights @ gather(value_cache)[:, None]
    return attended.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim).to(query.dtype)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of scores [kv_heads, group, Q, keys]; the sinks' share is dropped."""
    if sinks is None:
        return scores.softmax(dim=-1)
    of_rows = sinks.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, of_rows), dim=-1).softmax(dim=-1)[..., :-1]


def _fake(*args: object) -> None:
    return None


PAGED_ATTENTION = Op(
    "paged_attention",
    "(Tensor query, Tensor? key, Tensor? value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor block_tables, Tensor query_start_loc, Tensor seq_lens, Tensor slot_mapping, "
    "Tensor(c!) out, Tensor? sinks, float[] scalars, SymInt max_query_len, SymInt max_seq_len, "
    "bool deterministic=False, Tensor? schedule=None, int backend=0) -> ()",
    reference=reference,
    fake=_fake,
    build=build,
    cases=CASES,
    cost=cost,
    takes_backend=True,
    lazy={"cuda": "src.ops.triton.paged_attention:run"},
)


def paged_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    out: Tensor,
    spec: AttentionSpec,
    max_query_len: int,
    max_seq_len: int,
    deterministic: bool = False,
    schedule: Tensor | None = None,
    backend: int = 0,
) -> None:
    """Write keys and values into the paged cache, then attend causally over the cache into `out`.

    T tokens of B rows lie one row after another, possibly followed by padding tokens. Token t at
    offset q of row b has position `seq_lens[b] - query_len[b] + q`; it sees every position up to
    its own, or the last `spec.window` of them, or those of its chunk. float32, bfloat16 or float16,
    accumulated in float32. `query`, `key` and `value` may be slices of a fused projection: the last
    dimension is contiguous, heads are `head_dim` apart, the row stride is free.

    Without `key` and `value`, the cache must contain them already, as after
    [`rotate_and_cache`][src.ops.rotate_and_cache.rotate_and_cache]. Then nothing is written into
    the cache, and the output of padding tokens is left unchanged.

    Parameters
        query: [T, num_heads, head_dim], head_dim a multiple of 8 up to 256. (The CPU's kernels
            take up to 576, by which they compute latent attention.)
        key: [T, num_kv_heads, head_dim]; num_heads is a multiple of num_kv_heads. None
            if the cache has this step's keys and values.
        value: [T, num_kv_heads, head_dim]; None together with `key`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim] in the dtype of `query`, or in
            8 bits (int8, float8_e4m3fn) [num_blocks, block_size, num_kv_heads, head_dim + 4], see
            [`cached_rows`][src.ops.cached_rows]; changed in place.
        value_cache: Like `key_cache`.
        block_tables: [B, max_blocks] int32; entries beyond a row's length are not read.
        query_start_loc: [B + 1] int32, row -> its first token; the last is the number of tokens.
        seq_lens: [B] int32, row -> context length including this step's tokens.
        slot_mapping: [T] int64, token -> block * block_size + offset, or -1 to write nothing.
        out: [T, num_heads, head_dim], contiguous, changed in place; padding tokens get 0,
            unless `key` is None.
        spec: Scale and modifiers of the scores.
        max_query_len: Upper bound of the rows' query lengths (sizes a GPU grid without a sync).
        max_seq_len: Upper bound of `seq_lens`.
        deterministic: Whether a token's bits must depend only on its query and the keys and values
            that it sees: not on other tokens of the batch, nor on how its sequence was cut into
            chunks. Without it, a row's bits may depend on its query length and on the other rows.
        schedule: On CUDA, the [`decode_schedule`][src.ops.decode_schedule.decode_schedule] of
            these rows, as made by [`step_schedule`][src.ops.step_schedule]. None: every call makes
            its own.
        backend: `handle` of the [`AttentionBackend`][src.ops.attention_backend.AttentionBackend]
            that serves the call; 0 for the device's own kernels.

    Raises
        ValueError: From the compiled kernel, for shapes, dtypes, strides, slots or block numbers
            outside of this contract, and without `key` and `value`, which it always writes.
    """
    PAGED_ATTENTION.overload(
        query,
        key,
        value,
        key_cache,
        value_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        slot_mapping,
        out,
        spec.sinks,
        spec.scalars(),
        max_query_len,
        max_seq_len,
        deterministic,
        schedule,
        backend,
    )
