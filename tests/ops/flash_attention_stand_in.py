"""FlashAttention-3's paged attention in plain torch, and what it finds around it on a GPU.

It has the arguments, the checks and the conventions of the library's source (`hopper/` in
Dao-AILab/flash-attention: `flash_attn_interface.py`, `flash_api.cpp`), and leaves unwritten what
the library leaves unwritten.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from src.ops import PAGED_ATTENTION
from src.ops.attention.call import PagedAttention
from tests.ops.comparison import copied


def paged_varlen(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    page_table: Tensor,
    max_seqlen_q: int,
    scale: float,
    *,
    causal: bool,
    window_size: tuple[int, int],
    whole_pages: bool = False,
) -> None:
    """What `mha_fwd` does with these into `out` [T, heads, head_dim].

    With `whole_pages` values behind a row's end are multiplied by 0, as where TMA copies pages.
    """
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype == out.dtype
    assert all(x.stride(-1) == 1 for x in (q, k, v, out, page_table))
    rows = len(page_table)
    for lengths, size in ((cu_seqlens_q, rows + 1), (seqused_k, rows)):
        assert lengths.dtype == torch.int32
        assert lengths.is_contiguous()
        assert lengths.shape == (size,)
    assert page_table.dtype == torch.int32
    assert out.shape == q.shape
    _, heads, head_dim = q.shape
    pages, page_size, kv_heads, _ = k.shape
    assert head_dim % 8 == 0
    assert head_dim <= 256
    assert heads % kv_heads == 0
    left, right = window_size
    if causal:
        right = 0
    starts = cu_seqlens_q.tolist()
    for row, seqlen_k in enumerate(seqused_k.tolist()):
        begin, end = starts[row], starts[row + 1]
        seqlen_q = end - begin
        assert seqlen_q <= max_seqlen_q
        table = page_table[row, : -(-seqlen_k // page_size)].long()
        assert ((table >= 0) & (table < pages)).all()
        kept = len(table) * page_size if whole_pages else seqlen_k
        keys, values = (
            x[table].flatten(0, 1)[:kept].float().repeat_interleave(heads // kv_heads, dim=1)
            for x in (k, v)
        )
        # Aligned to the end: query i is at i + seqlen_k - seqlen_q.
        i = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        j = torch.arange(kept)[None, :]
        seen = j < seqlen_k
        if left >= 0:
            seen = seen & (j >= i - left)
        if right >= 0:
            seen = seen & (j <= i + right)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float() * scale, keys)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        weights = weights.masked_fill(~seen, 0)  # a query that sees nothing gets 0
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """Serves the calls that have pages and lengths; a new tensor, NaN where nothing is written."""
    assert (k, v, qv, cache_batch_idx, cache_leftpad, cu_seqlens_k_new) == (None,) * 6
    assert isinstance(cache_seqlens, Tensor)
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None
    assert num_splits == 1, "the split changes with the batch"
    assert not return_softmax_lse
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    paged_varlen(
        out,
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cache_seqlens,
        page_table,
        max_seqlen_q,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window_size=window_size,
    )
    return out


class TritonInTorch:
    """The Triton kernels' `run`, computed by the reference; counts who served prefill."""

    def __init__(self) -> None:
        self.prefill_calls = 0

    def __call__(self, call: PagedAttention, *, prefill: Callable[..., None] | None = None) -> None:
        query, key_cache, value_cache, out = call.query, call.key_cache, call.value_cache, call.out
        starts = call.query_start_loc
        rows = (call.block_tables, starts, call.seq_lens)
        complete = copied(call.flat())
        PAGED_ATTENTION.reference(*complete)
        key_cache.copy_(complete[3])
        value_cache.copy_(complete[4])
        if prefill is None:
            out.copy_(complete[9])
            return
        self.prefill_calls += 1
        out[starts[-1] :] = 0
        longest = (call.max_query_len, call.max_seq_len)
        prefill(query, key_cache, value_cache, *rows, out, call.spec, *longest)
        for row, count in enumerate(starts.diff().tolist()):
            if count == 1:
                out[starts[row]] = complete[9][starts[row]]


def as_module(**functions: Any) -> ModuleType:
    """`flash_attn_interface` with these functions."""
    module = ModuleType("flash_attn_interface")
    vars(module).update(functions)
    return module


def install(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Have `import flash_attn_interface` find the stand-in, or one with other functions."""
    functions = functions or {"flash_attn_with_kvcache": flash_attn_with_kvcache}
    monkeypatch.setitem(sys.modules, "flash_attn_interface", as_module(**functions))


def pretend_hopper(monkeypatch: pytest.MonkeyPatch) -> TritonInTorch:
    """Have CPU tensors served as on a Hopper, with this in place of the Triton kernels."""
    replaced = TritonInTorch()
    monkeypatch.setattr("src.ops.attention.paged_attention_triton.launch", replaced)
    # Made of it before.
    run = PagedAttention.taking_flat(replaced)
    monkeypatch.setattr("src.ops.attention.paged_attention_triton.run", run)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return replaced
