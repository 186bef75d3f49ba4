"""Capture by CUDA graphs that share one memory pool."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

# What the array interface has no name for travels as integers of the same size.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMES = {torch.uint8: "|u1", torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8"}


class CudaCapture:
    """See `CaptureBackend`. Of the thread that launches, inside its stream.

    Other threads may use the device meanwhile: only what this thread does is restricted.
    """

    def __init__(self, device: torch.device, *, asserts: bool = False) -> None:
        self.asserts = asserts
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._open: torch.cuda.CUDAGraph | None = None

    def begin_series(self) -> None:
        """See `CaptureBackend`: the order of captures is all that a series is."""

    def begin(self) -> None:
        """See `CaptureBackend`."""
        graph = torch.cuda.CUDAGraph()
        self._open = graph
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> torch.cuda.CUDAGraph:
        """See `CaptureBackend`."""
        graph = self._open
        assert graph is not None, "no capture has begun"
        # One that fails here is still to be abandoned.
        graph.capture_end()
        self._open = None
        return graph

    def abandon(self) -> None:
        """See `CaptureBackend`."""
        graph, self._open = self._open, None
        if graph is None:
            return
        # What broke the capture is known already; ending it only says so again.
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        # Up to torch 2.12 a capture that fails leaves the allocator believing that it goes on
        # (pytorch/pytorch#180395), and the next `empty_cache` fails. Where the pool is no longer
        # recorded to, the first call says so, and the second is not to be made.
        with contextlib.suppress(RuntimeError):
            index = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)

    def borrowed(self, tensor: Tensor) -> Tensor:
        """See `CaptureBackend`."""
        carrier = _CARRIERS[tensor.element_size()]
        # torch keeps the object that it takes an array from, and this one keeps nothing.
        return torch.as_tensor(_Memory(tensor.view(carrier)), device=self._device).view(
            tensor.dtype
        )

    def free_bytes(self) -> int:
        """See `CaptureBackend`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def release(self) -> None:
        """See `CaptureBackend`."""
        torch.cuda.empty_cache()

    def start_over(self) -> None:
        """See `CaptureBackend`: a pool that has lost its last graph takes no other one."""
        self._pool = torch.cuda.graph_pool_handle()
        self.release()


class _Memory:
    """Memory of a tensor of integers, without the tensor: ``__cuda_array_interface__``, version 2.

    Version 2 says nothing of streams, so nobody waits for one.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _NAMES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "version": 2,
        }
