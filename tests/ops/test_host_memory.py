"""Host memory is zero, takes up room as it is touched, and goes with its last tensor."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from src.ops.host_memory import lazy_zeros

MIB = 2**20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def mapped() -> int:
    """Bytes of its addresses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("shape", [(0, 7), (3, 5), (1024, 1024), (3, 1023, 1025)])
def test_it_is_a_tensor_of_zeros_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = lazy_zeros(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert not tensor.any()
    tensor.fill_(3)
    assert torch.equal(tensor, torch.full(shape, 3, dtype=dtype))


@linux_only
def test_what_nobody_touches_takes_no_memory() -> None:
    before = resident()
    tensor = lazy_zeros((256, MIB), torch.uint8)
    assert resident() - before < 32 * MIB
    tensor[:64].fill_(1)
    assert 64 * MIB <= resident() - before < 96 * MIB


@linux_only
def test_what_is_left_over_takes_no_large_page() -> None:
    """A matrix takes its own bytes, however they fall into pages of 2 MiB."""
    before = resident()
    matrices = [lazy_zeros((2 * MIB + 4096,), torch.uint8).fill_(1) for _ in range(64)]
    assert resident() - before < len(matrices) * (2 * MIB + 64 * 1024) + 16 * MIB


@linux_only
def test_its_last_view_frees_it() -> None:
    before = mapped()
    view = lazy_zeros((256, MIB), torch.uint8)[7:9, 5:]
    view.fill_(1)
    assert view.sum() == view.numel()
    assert mapped() - before >= 256 * MIB
    del view
    assert mapped() - before < 64 * MIB


@linux_only
def test_large_pages_are_asked_for() -> None:
    tensor = lazy_zeros((16, MIB), torch.uint8)
    assert tensor.data_ptr() % (2 * MIB) == 0
    flags = flags_of(tensor.data_ptr())
    # Where the kernel has none there is no such flag.
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping in which an address lies, see proc(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            first, last = (int(word, 16) for word in words[0].split("-"))
            inside = first <= address < last
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    return []
