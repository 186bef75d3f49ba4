"""Calls of the kernel of latent attention."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor

from src.ops.attention_spec import AttentionSpec
from src.ops.cpu.abi import LatentArgs
from src.ops.cpu.attention_specs import packed_specs
from src.ops.cpu.calls import DTYPES, kernel_threads, raise_status


def bind_latent(library: ctypes.CDLL) -> Callable[..., None]:
    """The op as a Python function."""
    function: Any = library.slipstream_latent_attention
    function.argtypes = (ctypes.POINTER(LatentArgs),)

    def latent_attention(
        query: Tensor,
        latent: Tensor,
        cache: Tensor,
        up: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        slot_mapping: Tensor,
        out: Tensor,
        scale: float,
        max_query_len: int,
        max_seq_len: int,
        deterministic: bool = False,
        expansion: Tensor | None = None,
        expanded_keys: int = 0,
    ) -> None:
        tokens, heads, query_dim = query.shape
        num_blocks, block_size, width = cache.shape
        rank, value = up.shape[2], out.shape[2]
        nope, rope = up.shape[1] - value, width - rank
        rows, max_blocks = block_tables.shape
        if not (
            query.dtype == latent.dtype == cache.dtype == up.dtype == out.dtype
            and query_dim == nope + rope
            and latent.shape == (tokens, width)
            and up.shape[0] == heads
            and out.shape == (tokens, heads, value)
            and query.stride()[1:] == (query_dim, 1)
            and latent.stride()[1] == 1
            and (block_tables.stride()[1] == 1 or max_blocks <= 1)
            and cache.is_contiguous()
            and up.is_contiguous()
            and out.is_contiguous()
        ):
            raise ValueError(
                "expected tensors of one dtype, contiguous but for the tokens of query and latent; "
                f"got query {tuple(query.shape)} {query.stride()} {query.dtype}, "
                f"latent {tuple(latent.shape)} {latent.stride()} {latent.dtype}, "
                f"cache {tuple(cache.shape)} {cache.dtype}, up {tuple(up.shape)} {up.dtype}, "
                f"out {tuple(out.shape)} {out.dtype}"
            )
        spec = packed_specs([AttentionSpec(scale)])
        status = function(
            LatentArgs(
                query=query.data_ptr(),
                latent=latent.data_ptr(),
                cache=cache.data_ptr(),
                up=up.data_ptr(),
                block_tables=block_tables.data_ptr(),
                query_start_loc=query_start_loc.data_ptr(),
                seq_lens=seq_lens.data_ptr(),
                slot_mapping=slot_mapping.data_ptr(),
                out=out.data_ptr(),
                spec=ctypes.addressof(spec),
                query_stride=query.stride(0),
                latent_stride=latent.stride(0),
                block_table_stride=block_tables.stride(0),
                tokens=tokens,
                rows=rows,
                heads=heads,
                nope=nope,
                rope=rope,
                rank=rank,
                value=value,
                num_blocks=num_blocks,
                block_size=block_size,
                max_blocks=max_blocks,
                dtype=DTYPES[query.dtype],
                threads=kernel_threads(),
                deterministic=deterministic,
            )
        )
        if status:
            raise_status(status)

    return latent_attention
