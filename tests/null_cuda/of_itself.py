"""What the CUDA that computes nothing refuses, a real one would."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from src.compile.graphs.cuda import CudaCapture
from tests.null_cuda.build import LAUNCHES, REPLAYS

GIB = 2**30


def counted(which: int) -> int:
    count = ctypes.CDLL(None).null_cuda_count
    count.restype = ctypes.c_long
    return int(count(which))


@pytest.fixture
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def test_it_is_there() -> None:
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties(0).multi_processor_count == 132
    product = torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")
    assert product.tolist() == 4 * [[0.0] * 4]


def test_memory_is_counted() -> None:
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    tensor = torch.empty(10 * GIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] == before - 10 * GIB
    del tensor
    assert torch.cuda.mem_get_info()[0] == before - 10 * GIB
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == before
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(200 * GIB, dtype=torch.uint8, device="cuda")


def test_the_host_cannot_read_device_memory() -> None:
    program = """
import ctypes, torch
where = torch.zeros(8, device="cuda").data_ptr()
print("there", flush=True)
ctypes.string_at(where, 4)
print("read", flush=True)
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("there\n", -signal.SIGSEGV)


def test_a_graph_is_replayed(stream: torch.cuda.Stream) -> None:
    given = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        given + 1
        launched = counted(LAUNCHES)
        graph.capture_end()
        assert counted(LAUNCHES) == launched
        before = counted(REPLAYS)
        graph.replay()
        assert counted(REPLAYS) == before + 1


@pytest.mark.parametrize("call", ["item", "synchronize", "event"])
def test_a_capture_refuses(stream: torch.cuda.Stream, call: str) -> None:
    given = torch.zeros(8, device="cuda")
    event = torch.cuda.Event()
    backend = CudaCapture(torch.device("cuda"))
    with torch.cuda.stream(stream):
        backend.begin()
        event.record()
        refused: Callable[[], object] = {
            "item": lambda: given[0].item(),
            "synchronize": torch.cuda.synchronize,
            "event": event.synchronize,
        }[call]
        with pytest.raises(RuntimeError, match="CUDA error"):
            refused()
        with pytest.raises(RuntimeError, match="CUDA error"):
            backend.end()
        backend.abandon()


@pytest.mark.parametrize("has_ended", [False, True])
def test_memory_is_given_back_after_an_abandoned_capture(
    stream: torch.cuda.Stream, has_ended: bool
) -> None:
    """torch itself would go on recording, and free nothing any more."""
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    backend = CudaCapture(torch.device("cuda"))
    with torch.cuda.stream(stream):
        backend.begin()
        made = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(RuntimeError, match="CUDA error"):
            torch.cuda.synchronize()
        if has_ended:
            with pytest.raises(RuntimeError, match="CUDA error"):
                backend.end()
        backend.abandon()
    del made
    backend.release()
    # But for the little that a random number generator has from the first capture on.
    assert torch.cuda.mem_get_info()[0] > before - GIB // 16
