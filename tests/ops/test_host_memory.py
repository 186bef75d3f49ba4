"""Host memory is zero, takes up room as it is touched, and goes with its last tensor."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.models import keys_and_values
from src.models.loading.loader import load_model
from src.models.loading.options import LoadOptions
from src.models.weights.methods import plain
from src.ops.build.kernels import ensure_built, kernel_library
from src.ops.host_memory import LargePages, lazy_zeros
from tests.support.checkpoints import make_checkpoint

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
    assert 60 * MIB <= resident() - before < 96 * MIB


@linux_only
def test_what_is_left_over_takes_no_large_page() -> None:
    """A matrix takes its own bytes, however they fall into pages of 2 MiB."""
    before = resident()
    shape = (2 * MIB + 4096,)
    matrices = [lazy_zeros(shape, torch.uint8).fill_(1) for _ in range(64)]
    assert resident() - before < len(matrices) * (2 * MIB + 64 * 1024) + 16 * MIB


@linux_only
def test_its_last_view_frees_it() -> None:
    before = mapped()
    view = lazy_zeros((1024, MIB), torch.uint8)[7:9, 5:]
    view.fill_(1)
    assert view.sum() == view.numel()
    assert mapped() - before >= 1024 * MIB
    del view
    # A thread that begins meanwhile takes some, too.
    assert mapped() - before < 512 * MIB


@linux_only
def test_large_pages_are_asked_for() -> None:
    tensor = lazy_zeros((16, MIB), torch.uint8)
    assert tensor.data_ptr() % (2 * MIB) == 0
    assert is_in_large_pages(tensor)


def test_what_nobody_can_have_is_said_in_bytes() -> None:
    with pytest.raises((MemoryError, RuntimeError), match="4611686018427387904"):
        lazy_zeros((2**62,), torch.int8)


@linux_only
def test_a_models_matrices_lie_in_large_pages(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, hidden_size=1024, intermediate_size=2048)
    model = load_model(directory, LoadOptions(load_format="dummy"))
    assert is_in_large_pages(plain(model.weights["layers.0.gate_up_weight"]))
    assert ensure_built(wait=True)
    library = kernel_library()
    assert library is not None
    for number in ("int8", "int4"):
        matrix = library.quantize(torch.ones(4096, 2048), number, 32, tiled=False)
        assert is_in_large_pages(matrix.values)


@linux_only
def test_keys_and_values_take_no_memory_before_there_are_any() -> None:
    layers = [keys_and_values(8, 64, torch.bfloat16, None)] * 4
    plan = KVCachePlan(block_size=16, num_blocks=8192, bytes_per_block=4 * 2 * 16 * 8 * 64 * 2)
    assert plan.total_bytes == 1024 * MIB
    before = resident()
    cache = allocate_kv_cache(layers, plan, torch.device("cpu"))
    assert resident() - before < 64 * MIB
    assert not cache.layers[3]["keys"][8191].any()
    assert is_in_large_pages(cache.layers[0]["values"])


HAS_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()


def is_in_large_pages(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory asks for them; where the kernel has none there is no such flag."""
    return "hg" in flags_of(tensor.data_ptr()) or not HAS_LARGE_PAGES


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


def large_pages_of(tensor: torch.Tensor) -> int:
    """Bytes of the mapping of a tensor that are in huge pages, or of which the kernel may make one.

    Whether it has any left is the machine's matter, so a mapping that asked for them counts.
    """
    first = tensor.data_ptr()
    inside, flags = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(end, 16) for end in head.split("-"))
            inside = low <= first < high
            size = high - low
        elif inside and head == "VmFlags:":
            flags = line
            break
    return size if " hg" in flags else 0


@linux_only
def test_small_tensors_share_large_pages() -> None:
    pages = LargePages()
    tensors = [pages.zeros((3, 5 + i), torch.bfloat16) for i in range(40)]
    assert len({each.data_ptr() // (2 * MIB) for each in tensors}) == 1
    assert all(each.data_ptr() % 64 == 0 and each.is_contiguous() for each in tensors)
    for number, each in enumerate(tensors):
        assert not each.any(), "nobody else has written there"
        each.fill_(number + 1)
    assert [int(each.max()) for each in tensors] == list(range(1, 41))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Of others nothing is said: the heap may have large pages as well.
        assert large_pages_of(tensors[7]) >= 2 * MIB


def test_what_is_kept_has_the_same_values_in_large_pages() -> None:
    pages = LargePages()
    small, large = torch.randn(9, 7), torch.randint(-9, 9, (1024, 4097), dtype=torch.int8)
    for tensor in (small, large, torch.zeros(0, 3)):
        kept = pages.keep(tensor)
        assert torch.equal(kept, tensor)
        assert (kept.dtype, kept.stride()) == (tensor.dtype, tensor.stride())
    kept = pages.keep(large)
    assert kept.data_ptr() != large.data_ptr()
    assert pages.keep(kept).data_ptr() == kept.data_ptr(), "it is there already"
    across = torch.randn(4, 6).t()
    assert pages.keep(across) is across, "its elements lie as they do for a reason"


def test_chunks_follow_one_another() -> None:
    pages = LargePages()
    tensors = [pages.zeros((MIB,), torch.uint8).fill_(i) for i in range(40)]
    assert all(bool((each == i).all()) for i, each in enumerate(tensors))


@linux_only
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_a_models_small_weights_are_in_large_pages(
    tmp_path: Path, quantization: str | None
) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    options = LoadOptions(quantization=quantization)
    model = load_model(checkpoint, options)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        small = {n: t for n, t in model.parameters().items() if 0 < t.nbytes < 2 * MIB}
        assert small
        assert [n for n, t in small.items() if not large_pages_of(t)] == []
