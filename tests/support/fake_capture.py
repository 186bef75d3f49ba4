"""Capture and replay without a GPU: operations are recorded as they are dispatched.

This misses what a CUDA graph misses: Python between the operations does not run again, so its
results are fixed at capture; and operations run again on the same tensors. Errors on a GPU are
errors here: reading a value on the host during a capture, replaying a series out of order, and
reading memory that another capture has overwritten. (Captures share memory on a GPU; here, other
captures' tensors are filled with invalid values.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.no_waiting import WAITING


class CaptureError(AssertionError):
    """A GPU would have refused this, or computed wrong results."""


def tensors_in(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Series:
    """Captures that share tensors; ``made`` is what they allocated."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.captures: list[FakeCaptured] = []


class FakeCaptured:
    """The operations of one capture, in order."""

    def __init__(self, backend: FakeCapture, series: Series) -> None:
        self._backend = backend
        self._series = series
        self._index = len(series.captures)
        # (operation, arguments, keyword arguments, results with memory of their own)
        self.operations: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        # id -> (tensor, address), for tensors that it reads but did not allocate.
        self.given: dict[int, tuple[Tensor, int]] = {}
        self.num_replays = 0

    def record(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        if operation in WAITING:
            raise CaptureError(f"{operation} waits for the device")
        made = {id(tensor) for tensor in self._series.made}
        known = {address(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) not in made:
                self.given.setdefault(id(tensor), (tensor, tensor.data_ptr()))
        fresh = [
            (index, tensor)
            for index, tensor in enumerate(tree_leaves(result))
            if isinstance(tensor, Tensor) and address(tensor) not in known
        ]
        self._series.made += [tensor for _, tensor in fresh]
        self.operations.append((operation, args, kwargs, fresh))

    def replay(self) -> None:
        self._backend.enter(self._series, self._index)
        for tensor, where in self.given.values():
            if tensor.data_ptr() != where:
                raise CaptureError("a tensor has moved since the capture")
        for operation, args, kwargs, fresh in self.operations:
            leaves = tree_leaves(operation(*args, **kwargs))
            for index, tensor in fresh:
                tensor.copy_(leaves[index])
        self.num_replays += 1


class _Recording(TorchDispatchMode):
    def __init__(self, captured: FakeCaptured) -> None:
        super().__init__()
        self.captured = captured

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.captured.record(func, args, kwargs or {}, result)
        return result


class FakeCapture:
    """A `CaptureBackend` on the CPU.

    ``free`` returns the free memory for a number of existing captures; ``fail_at`` is the number of
    the capture that fails.
    """

    asserts = True

    def __init__(
        self, free: Callable[[int], int] = lambda count: 0, fail_at: int | None = None
    ) -> None:
        self.captures: list[FakeCaptured] = []
        self.releases = 0
        self.starts = 0
        self._free = free
        self._fail_at = fail_at
        self._series = Series()
        self._recording: _Recording | None = None
        # The series that ran last, and the index of its next capture.
        self._running: Series | None = None
        self._next = 0

    @property
    def is_capturing(self) -> bool:
        """Whether a capture has begun and has not ended."""
        return self._recording is not None

    def begin_series(self) -> None:
        self._series = Series()

    def begin(self) -> None:
        assert self._recording is None, "captures do not nest"
        self._recording = _Recording(FakeCaptured(self, self._series))
        self._recording.__enter__()

    def end(self) -> FakeCaptured:
        recording, self._recording = self._recording, None
        assert recording is not None, "no capture has begun"
        recording.__exit__(None, None, None)
        if len(self.captures) == self._fail_at:
            raise CaptureError("out of memory")
        self.captures.append(recording.captured)
        self._series.captures.append(recording.captured)
        # The capture has run once to be recorded, which has the effects of a replay.
        self._spoil(self._series)
        self._running, self._next = None, 0
        return recording.captured

    def abandon(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.__exit__(None, None, None)

    def borrowed(self, tensor: Tensor) -> Tensor:
        assert self._recording is None, "while nothing is captured"
        return tensor

    def free_bytes(self) -> int:
        return self._free(len(self.captures))

    def release(self) -> None:
        self.releases += 1

    def start_over(self) -> None:
        self.starts += 1

    def enter(self, series: Series, index: int) -> None:
        """Call before a capture of ``series`` runs."""
        if index and (self._running is not series or self._next != index):
            raise CaptureError("a series is replayed out of its order")
        self._spoil(series)
        self._running, self._next = series, index + 1

    def _spoil(self, series: Series) -> None:
        """Invalidate the tensors of the series that ran last, if it is another one."""
        last = self._running
        if last is not None and last is not series:
            for tensor in last.made:
                rubbish = float("nan") if tensor.is_floating_point() else -7
                if tensor.dtype != torch.bool:
                    tensor.fill_(rubbish)
