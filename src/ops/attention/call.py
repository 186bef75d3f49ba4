"""The record of a call of paged attention."""

from __future__ import annotations

import torch
from torch import Tensor

from src.ops.attention.spec import AttentionSpec
from src.ops.records import ANY, Record, nested, number, tensor


class PagedAttention(Record):
    """Write keys and values into the paged cache, then attend over the cache into `out`.

    T tokens of B rows lie one row after another, possibly followed by padding tokens. Token t at
    offset q of row b has position `seq_lens[b] - query_len[b] + q`; it sees every position up to
    its own, or the last `spec.window` of them, or those of its chunk; and `spec.ahead` positions of
    its row behind its own. float32, bfloat16 or float16,
    accumulated in float32. `query`, `key` and `value` may be slices of a fused projection: the last
    dimension is contiguous, heads are `head_dim` apart, the row stride is free.

    Without `key` and `value`, the cache must contain them already, as after `rotate_and_cache`.
    Then nothing is written into the cache, and the output of padding tokens is left unchanged.

    Attributes
    ----------
    query
        [T, num_heads, head_dim], head_dim a multiple of 8 up to 256. (The CPU's kernels take up to
        576, by which they compute latent attention.)
    key
        [T, num_kv_heads, head_dim]; num_heads is a multiple of num_kv_heads. None if the cache has
        this step's keys and values.
    value
        [T, num_kv_heads, head_dim]; None together with `key`.
    key_cache
        [num_blocks, block_size, num_kv_heads, head_dim] in the dtype of `query`, or in 8 bits
        (int8, float8_e4m3fn) [num_blocks, block_size, num_kv_heads, head_dim + 4], see
        `cached_rows`; changed in place.
    value_cache
        Like `key_cache`.
    block_tables
        [B, max_blocks] int32; entries beyond a row's length are not read.
    query_start_loc
        [B + 1] int32, row -> its first token; the last is the number of tokens.
    seq_lens
        [B] int32, row -> context length including this step's tokens.
    slot_mapping
        [T] int64, token -> block * block_size + offset, or -1 to write nothing.
    out
        [T, num_heads, head_dim], contiguous, changed in place; padding tokens get 0, unless `key`
        is None.
    spec
        Scale and modifiers of the scores.
    max_query_len
        Upper bound of the rows' query lengths (sizes a GPU grid without a sync).
    max_seq_len
        Upper bound of `seq_lens`.
    deterministic
        Whether a token's bits must depend only on its query and the keys and values that it sees:
        not on other tokens of the batch, nor on how its sequence was cut into chunks. Without it, a
        row's bits may depend on its query length and on the other rows.
    schedule
        On CUDA, the `decode_schedule` of these rows, as made by `step_schedule`. None: every call
        makes its own.
    verifies
        [B] int32, row -> 1 if its tokens verify drafts, else 0; None: no row's do. A kernel may
        round them as it rounds tokens that come one at a time; that of the CPU does so for up to 25
        of them within 8192 keys. With `deterministic` it means nothing.
    backend
        `handle` of the `AttentionBackend` that serves the call; 0 for the device's own kernels.

    Raises
    ------
    ValueError
        From the compiled kernel, for shapes, dtypes, strides, slots or block numbers outside of
        this contract, and without `key` and `value`, which it always writes.
    """

    query: Tensor = tensor("tokens num_heads head_dim", rows=True)
    key: Tensor | None = tensor("tokens num_kv_heads head_dim", rows=True)
    value: Tensor | None = tensor("tokens num_kv_heads head_dim", rows=True)
    key_cache: Tensor = tensor("num_blocks block_size num_kv_heads _", ANY, changed=True)
    value_cache: Tensor = tensor("num_blocks block_size num_kv_heads _", ANY, changed=True)
    block_tables: Tensor = tensor("rows max_blocks", torch.int32, rows=True)
    query_start_loc: Tensor = tensor("rows+1", torch.int32)
    seq_lens: Tensor = tensor("rows", torch.int32)
    slot_mapping: Tensor = tensor("tokens", torch.int64)
    out: Tensor = tensor("tokens num_heads head_dim", changed=True)
    spec: AttentionSpec = nested()
    max_query_len: int = number(varies=True, on_cpu=False)
    max_seq_len: int = number(varies=True, on_cpu=False)
    deterministic: bool = number(default=False)
    schedule: Tensor | None = tensor("_", torch.int32, on_cpu=False, default=None)
    verifies: Tensor | None = tensor("rows", torch.int32, default=None)
    backend: int = number(on_cpu=False, default=0)
