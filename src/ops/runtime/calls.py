"""Common parts of all calls of a kernel library: dtypes, threads, and the errors of a status."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of dtypes in `abi.h`."""

_ERRORS = {
    1: "slot_mapping names a slot outside of the cache",
    2: "a block table names a block outside of the cache",
    3: "query_start_loc, seq_lens and the tensors' sizes contradict each other",
    4: "expected head_dim a multiple of 8 up to 256, num_heads a multiple of num_kv_heads, "
    "block_size of at least 1, groups of int4 a multiple of 32, inputs of int8 in strips a "
    "multiple of 64 and of bfloat16 of 2, outputs of int4 and bfloat16 in strips a multiple of 64",
    7: "a step has a token that nobody has produced, or that is not in the vocabulary",
    8: "a step names a row, or a position of it, that is not there",
    9: "the masks are not of the rows that sample, or shorter than their logits",
}


class _Local(threading.local):
    threads = 0


_local = _Local()


def use_threads(threads: int) -> None:
    """Set the number of threads for kernels that this thread calls; 0 for torch's number."""
    _local.threads = threads


def kernel_threads() -> int:
    """The number of threads for kernels that this thread calls."""
    return _local.threads or torch.get_num_threads()


def address_of(tensor: Tensor | None) -> int:
    """Where a tensor's elements lie; 0, which is null, for None."""
    return 0 if tensor is None else tensor.data_ptr()


def raise_status(status: int) -> None:
    """Raise the error that a status of the library (`abi.h`) stands for."""
    if status in _ERRORS:
        raise ValueError(_ERRORS[status])
    raise MemoryError("no memory for what a kernel computes on the way")
