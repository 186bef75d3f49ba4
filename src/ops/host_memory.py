"""Host memory for data that every step reads: weights, keys and values."""

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
"""Bytes of a huge page on x86-64, and on arm64 with base pages of 4 KiB."""
_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE` (Linux 5.14); the `mmap` module does not name it."""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeroed host memory that is allocated on first touch, in huge pages where allowed.

    `torch.zeros` touches all pages at once: about a second for a few GB that may never be used.

    Each token reads every weight once. With 4 KiB pages that needs a page-table walk per page. A
    walk is costly in a virtual machine, where the host's tables are walked as well, and costliest
    where other programs evict the tables from the caches. So weights ask for huge pages. The
    administrator decides whether there are any (`/sys/kernel/mm/transparent_hugepage/enabled`:
    `madvise` or `always`). Keys and values ask for them because the first touch is cheaper in
    total; but one step pays for it at once, when every layer reaches a new page.

    Parameters
    ----------
    shape
        Of the tensor, which is contiguous.
    dtype
        Any.

    Raises
    ------
    MemoryError
        The address space cannot be reserved.
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
    # The kernel may be built without huge pages.
    with contextlib.suppress(OSError):
        # Keep the unaligned rest on small pages, even where huge pages are the default.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // LARGE_PAGE * LARGE_PAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(tuple(shape))


class LargePages:
    """Host memory for tensors that are too small for large pages of their own.

    They lie one behind the other in chunks that are in large pages, in the order in which they are
    asked for. A step of a small model reads some hundred matrices of less than such a page; on
    small pages their page-table walks take about a sixth of its products' time. A chunk goes with
    its last tensor. One thread at a time.
    """

    _CHUNK = 16 << 20  # bytes of address space; memory is taken as it is touched
    _LINE = 64  # as torch aligns tensors

    def __init__(self) -> None:
        self._chunk: torch.Tensor | None = None
        self._end = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Like `lazy_zeros`, and small tensors in large pages too.

        Raises
        ------
        MemoryError
            The address space cannot be reserved.
        """
        size = math.prod(shape) * dtype.itemsize
        if size == 0 or size >= LARGE_PAGE:
            return lazy_zeros(shape, dtype)
        begin = -(-self._end // self._LINE) * self._LINE
        if self._chunk is None or begin + size > self._CHUNK:
            self._chunk, begin = lazy_zeros((self._CHUNK,), torch.uint8), 0
        self._end = begin + size
        return self._chunk[begin : self._end].view(dtype).view(tuple(shape))

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as it is, or on the host a copy of it that is in large pages."""
        # `lazy_zeros` begins at one.
        is_there = tensor.data_ptr() % LARGE_PAGE == 0
        if not tensor.is_cpu or is_there or not tensor.is_contiguous():
            return tensor
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)


def take(tensor: torch.Tensor, start: int, size: int) -> bool:
    """Make the system allocate pages of a `lazy_zeros` tensor now instead of on first touch.

    The contents do not change, even if another thread writes to them meanwhile. The GIL is released
    during the call.

    Parameters
    ----------
    tensor
        The whole tensor that `lazy_zeros` returned.
    start
        Offset from its beginning in bytes, at a page boundary.
    size
        Length in bytes.

    Returns
    -------
    Whether the system allocated them.
    """
    if sys.platform != "linux":
        return False
    size = min(size, tensor.nbytes - start)
    return _madvise()(tensor.data_ptr() + start, size, _POPULATE_WRITE) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    # `mmap.madvise` would hold the GIL during the call; ctypes releases it.
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return cast("Callable[[int, int, int], int]", madvise)
