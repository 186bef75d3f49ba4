"""Capture by CUDA graphs that share one memory pool."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

# dtypes that the array interface cannot name are passed as integers of the same size.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMES = {torch.uint8: "|u1", torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8"}


class CudaCapture:
    """See `CaptureBackend`. To be used on the launching thread, in its stream.

    Other threads may use the device during a capture; only the capturing thread is restricted.
    """

    def __init__(self, device: torch.device, *, asserts: bool = False) -> None:
        self.asserts = asserts
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._open: torch.cuda.CUDAGraph | None = None
        # What a capture behind an abandoned one writes to: there may be no memory left then.
        self._scratch = torch.empty(1, device=device)

    def begin_series(self) -> None:
        """See `CaptureBackend`: the order of captures alone defines a series."""

    def begin(self) -> None:
        """See `CaptureBackend`."""
        graph = torch.cuda.CUDAGraph()
        self._open = graph
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> torch.cuda.CUDAGraph:
        """See `CaptureBackend`."""
        graph = self._open
        assert graph is not None, "no capture has begun"
        # If this fails, the capture must still be abandoned, so `_open` is reset only afterwards.
        graph.capture_end()
        self._open = None
        return graph

    def abandon(self) -> None:
        """See `CaptureBackend`."""
        graph, self._open = self._open, None
        if graph is None:
            return
        # Ending a broken capture raises the error that is already known.
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        # Up to torch 2.12, the allocator goes on recording after a failed capture
        # (pytorch/pytorch#180395), and the next `empty_cache` fails. If the pool is no longer being
        # recorded, the first call raises, and the second must not be made.
        with contextlib.suppress(RuntimeError):
            index = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        # torch's own generator stays in its capturing state until a capture ends well, and whatever
        # draws from it would fail.
        with contextlib.suppress(RuntimeError):
            small = torch.cuda.CUDAGraph()
            small.capture_begin(capture_error_mode="thread_local")
            try:
                self._scratch.zero_()
            finally:
                # Whatever happens, the stream must not stay in a capture.
                small.capture_end()

    def borrowed(self, tensor: Tensor) -> Tensor:
        """See `CaptureBackend`."""
        carrier = _CARRIERS[tensor.element_size()]
        # torch keeps a reference to the object that it takes the array from. `_Memory` holds none.
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
        """See `CaptureBackend`: a pool whose last graph is gone cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()
        self.release()


class _Memory:
    """Memory of an integer tensor, without the tensor: ``__cuda_array_interface__``, version 2.

    Version 2 has no stream, so torch does not synchronize with one.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _NAMES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "version": 2,
        }
