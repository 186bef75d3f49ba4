"""Host memory for what steps read again and again: weights, keys and values."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import cast

import torch

LARGE_PAGE = 2**21
"""Bytes of what x86-64, and arm64 with small pages of 4 KiB, call a huge page."""
_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, of Linux 5.14; Python has no name for it."""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros of host memory which the system gives as they are touched, in large pages if it may.

    `torch.zeros` touches them all at once: a second for a few GB, which may never be used.

    A token reads every weight once, which is a walk through the page tables for each 4 KiB: costly
    in a virtual machine, where the host's tables are walked as well, and most of all where
    neighbours keep both out of the caches. So weights ask for large pages; whether there are some
    is the administrator's decision (`/sys/kernel/mm/transparent_hugepage/enabled`: `madvise` or
    `always`). Keys and values do too, for what touching them first takes: less in all, if all at
    once for the step in which every layer comes to a new page.

    Args:
        shape: of the tensor, contiguous.
        dtype: any.

    Raises:
        MemoryError: the system does not give as many addresses.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype)
    try:
        memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes for a tensor {list(shape)}: {error.strerror}") from error
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % LARGE_PAGE
    # A kernel may be built without them.
    with contextlib.suppress(OSError):
        # What is left over would otherwise take one too, where all memory is given so.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // LARGE_PAGE * LARGE_PAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(tuple(shape))


def take(tensor: torch.Tensor, start: int, size: int) -> bool:
    """Have the system give pages of `lazy_zeros` now that would else be given as they are touched.

    What they hold stays as it is, also while somebody writes it. Other threads of Python go on.

    Args:
        tensor: whole, as `lazy_zeros` made it.
        start: in bytes from its begin, at a page's.
        size: in bytes.

    Returns:
        Whether the system did.
    """
    if sys.platform != "linux":
        return False
    size = min(size, tensor.nbytes - start)
    return _madvise()(tensor.data_ptr() + start, size, _POPULATE_WRITE) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    # Python's own keeps the interpreter lock meanwhile.
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return cast("Callable[[int, int, int], int]", madvise)
