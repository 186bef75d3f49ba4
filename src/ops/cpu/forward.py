"""A whole forward pass of compiled code in one call of the kernel library.

Between the layers runs no Python: a small model's step is otherwise mostly that.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from src.ops.cpu.compiled import Bound, Caller, stolen
from src.ops.cpu.kernel_library import DTYPES, raise_status

_FORWARD: Final = struct.Struct("@Pq6P10P16qd").pack  # ForwardArgs
_STATUS_BAD_SHAPE: Final = 5  # and below: the attention kernel's own


class CompiledForward:
    """Embedding to final norm, attention and its writes to the KV cache between.

    One thread at a time may call it.

    Parameters
        calls: The first region, the middle one for each layer but one, the last; each with its
            weights. The first takes token ids and positions and returns query, key, value and
            residual; a middle one takes attention output, residual and positions and returns the
            same; the last takes attention output and residual and returns the hidden states.
        key_caches, value_caches: Per layer, [num_blocks, block_size, num_kv_heads, head_dim].
        sliding_windows: Per layer, in tokens; 0 is the whole context.
        num_heads: Of the queries.
        scale: Factor on query-key products.
        num_threads: Of the attention kernel.
        deterministic: As of [`paged_attention`][src.ops.paged_attention.paged_attention].
    """

    def __init__(
        self,
        caller: Caller,
        calls: Sequence[Bound],
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        sliding_windows: Sequence[int],
        *,
        num_heads: int,
        scale: float,
        num_threads: int,
        deterministic: bool = False,
    ) -> None:
        if len(calls) != len(key_caches) + 1:
            raise ValueError(f"expected one call more than layers, got {len(calls)}")
        cache = key_caches[0]
        if not all(kv.is_contiguous() for kv in (*key_caches, *value_caches)):
            raise ValueError("expected contiguous caches")
        self._caller = caller
        self._calls = list(calls)
        self._caches = [*key_caches, *value_caches]
        layers = len(key_caches)
        self._tables = (
            (ctypes.c_void_p * (layers + 1))(*[call.address for call in calls]),
            (ctypes.c_void_p * layers)(*[kv.data_ptr() for kv in key_caches]),
            (ctypes.c_void_p * layers)(*[kv.data_ptr() for kv in value_caches]),
            (ctypes.c_int64 * layers)(*sliding_windows),
        )
        self._addresses = [ctypes.addressof(table) for table in self._tables]
        self._num_layers = layers
        self._num_blocks, self._block_size, self._num_kv_heads, self._head_dim = cache.shape
        self._num_heads = num_heads
        self._scale = scale
        self._dtype = cache.dtype
        self._num_threads = num_threads
        self._deterministic = deterministic

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Hidden states after the final norm, [T, H].

        Parameters
            input_ids, positions, slot_mapping: int64 [T], contiguous.
            block_tables, query_start_loc, seq_lens: As of
                [`paged_attention`][src.ops.paged_attention.paged_attention].

        Raises
            ValueError, MemoryError: As the attention op does.
            CompiledCodeError: Compiled code failed.
        """
        tokens = len(input_ids)
        rows, max_blocks = block_tables.shape
        if max_blocks > 1 and block_tables.stride(1) != 1:
            raise ValueError(f"expected contiguous rows of blocks, got {block_tables.stride()}")
        out = torch.empty(tokens * self._num_heads * self._head_dim, dtype=self._dtype)
        hidden = (ctypes.c_void_p * 1)()
        calls, keys, values, windows = self._addresses
        status = self._caller.forward(
            _FORWARD(
                calls,
                self._num_layers,
                input_ids.data_ptr(),
                positions.data_ptr(),
                keys,
                values,
                windows,
                ctypes.addressof(hidden),
                *(0, 0, 0, 0, 0),
                block_tables.data_ptr(),
                query_start_loc.data_ptr(),
                seq_lens.data_ptr(),
                slot_mapping.data_ptr(),
                out.data_ptr(),
                *(0, 0, 0),
                block_tables.stride(0),
                tokens,
                rows,
                self._num_heads,
                self._num_kv_heads,
                self._head_dim,
                self._num_blocks,
                self._block_size,
                max_blocks,
                0,
                DTYPES[self._dtype],
                self._num_threads,
                self._deterministic,
                self._scale,
            )
        )
        if status > _STATUS_BAD_SHAPE:
            self._calls[0].fail(status)
        if status:
            raise_status(status)
        return stolen(hidden)[0]
