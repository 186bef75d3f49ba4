"""Paged attention: write this step's keys and values into the cache, then attend over it.

One op for prefill chunks, decode and everything between: a batch row is "the next n tokens of a
sequence". The paged cache follows W. Kwon et al., "Efficient Memory Management for Large Language
Model Serving with PagedAttention", SOSP'23.
"""

from __future__ import annotations

import torch
from torch import Tensor

from src.ops.attention.cached_rows import from_rows, is_coded, write_rows
from src.ops.attention.call import PagedAttention
from src.ops.attention.cases import CASES, build, cost
from src.ops.attention.spec import AttentionSpec
from src.ops.declaration import Op

_REFERENCE_QUERY_TILE = 512
"""Queries that the reference attends at once; this bounds the size of its score matrix."""


def reference(call: PagedAttention) -> None:
    """See `PagedAttention`."""
    starts, out = call.query_start_loc.tolist(), call.out
    if call.key is not None and call.value is not None:
        _write_cache(call.key, call.key_cache, call.slot_mapping)
        _write_cache(call.value, call.value_cache, call.slot_mapping)
        out[starts[-1] :] = 0
    for row, seq_len in enumerate(call.seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        for tile in range(begin, end, _REFERENCE_QUERY_TILE):
            tile_end = min(tile + _REFERENCE_QUERY_TILE, end)
            out[tile:tile_end] = _attend(
                call.query[tile:tile_end],
                call.key_cache,
                call.value_cache,
                call.block_tables[row],
                first_position=seq_len - (end - tile),
                seq_len=seq_len,
                spec=call.spec,
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
    seq_len: int,
    spec: AttentionSpec,
) -> Tensor:
    """Attention of consecutive tokens of one row, [Q, heads, head_dim] in `query`'s dtype."""
    num_queries, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    end = first_position + num_queries
    first_key = spec.first_visible(first_position)
    last = spec.visible_end(end - 1, seq_len)
    first_block = first_key // block_size
    blocks = block_table[first_block : -(-last // block_size)].long()
    skipped = first_block * block_size

    def gather(cache: Tensor) -> Tensor:  # [kv_heads, keys, head_dim] float32
        octets = cache.view(torch.uint8) if is_coded(cache.dtype) else cache
        rows = octets[blocks].flatten(0, 1)[first_key - skipped : last - skipped].view(cache.dtype)
        return from_rows(rows).transpose(0, 1)

    # [kv_heads, group, Q, head_dim] float32: query head h reads key/value head h // group
    grouped = query.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    positions = torch.arange(first_position, end, device=query.device)[:, None]
    keys = torch.arange(first_key, last, device=query.device)[None, :]
    visible = keys <= positions + (spec.ahead or 0)  # [Q, keys] bool
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


PAGED_ATTENTION = Op(
    "paged_attention",
    PagedAttention,
    reference=reference,
    build=build,
    cases=CASES,
    cost=cost,
    lazy={"cuda": "src.ops.attention.paged_attention_triton:run"},
)

paged_attention = PAGED_ATTENTION.function
"""The op as a function of the fields of `PagedAttention`.
"""
