"""What the CUDA that computes nothing refuses, a real one would."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from src.compile.graphs.cuda import CudaCapture
from src.engine.devices.cuda import CudaDevice
from tests.null_cuda.build import LAUNCHES, REFUSALS, REPLAYS

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


@pytest.mark.parametrize("has_ended", [False, True])
def test_torch_draws_after_an_abandoned_capture(stream: torch.cuda.Stream, has_ended: bool) -> None:
    """Its generator is told of captures when they begin, and when they end well."""
    backend = CudaCapture(torch.device("cuda"))
    with torch.cuda.stream(stream):
        backend.begin()
        torch.empty(16, device="cuda").zero_()
        with pytest.raises(RuntimeError, match="CUDA error"):
            torch.cuda.synchronize()
        if has_ended:
            with pytest.raises(RuntimeError, match="CUDA error"):
                backend.end()
        backend.abandon()
    torch.randn(4, device="cuda")
    torch.cuda.get_rng_state()


def test_an_abandoned_capture_leaves_the_stream_when_there_is_no_memory(
    stream: torch.cuda.Stream,
) -> None:
    """The natural reason to abandon one. A stream that stays in a capture serves nothing."""
    backend = CudaCapture(torch.device("cuda"))
    given = torch.zeros(16, device="cuda")
    with torch.cuda.stream(stream):
        # The first one of a process takes memory for torch's generator.
        backend.begin()
        given.zero_()
        first = backend.end()
    torch.cuda.empty_cache()
    held, size = [], torch.cuda.mem_get_info()[0]
    while size >= 2**21:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    with torch.cuda.stream(stream):
        backend.begin()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**24, device="cuda")
        backend.abandon()
        assert not torch.cuda.is_current_stream_capturing()
        given.zero_()
    del held, first
    torch.cuda.empty_cache()


def in_a_thread(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_the_device_cannot_be_waited_for_during_a_capture(stream: torch.cuda.Stream) -> None:
    backend = CudaCapture(torch.device("cuda"))
    with torch.cuda.stream(stream):
        backend.begin()
        with pytest.raises(RuntimeError, match="CUDA error"):
            in_a_thread(torch.cuda.synchronize)
        backend.abandon()


@pytest.mark.parametrize("whose", ["another's", "its own"])
def test_who_asks_for_a_failure_leaves_a_capture_alone(
    stream: torch.cuda.Stream, whose: str
) -> None:
    """In the thread that waits for steps, while the other captures."""
    device = CudaDevice(torch.device("cuda"))
    backend = CudaCapture(torch.device("cuda"))
    capturing = torch.cuda.stream(stream) if whose == "another's" else device.stream()
    refused = counted(REFUSALS)
    with capturing:
        backend.begin()
        torch.empty(16, device="cuda").zero_()
        assert in_a_thread(device.failure) is None
        if whose == "another's":
            in_a_thread(device.synchronize)
        backend.end()
    assert counted(REFUSALS) == refused
    device.close()


@pytest.mark.parametrize("captures", [False, True])
def test_a_lost_device_is_found_lost(monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
    device = CudaDevice(torch.device("cuda"))
    assert device.failure() is None

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    # It fails whatever it is asked.
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    assert "illegal memory access" in str(device.failure())
    device.close()
