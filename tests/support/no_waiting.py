"""Checks that steps do not wait for the device: by CUDA on a GPU, as far as possible without one.

Both watch the device thread's work for a step up to the launch of its copy-out: writing rows and
block tables, uploading inputs, computing the step. On the CPU, reading device values always works,
so this check intercepts the reads: of values, and of shapes that depend on values. It cannot detect
copies from memory that is not pinned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from src.engine.devices import transfer
from src.engine.execution.row_owners import RowOwners
from src.engine.execution.step_computer import StepComputer, StepOutput
from src.engine.execution.worker import Worker
from src.engine.sampling import truncation

aten = torch.ops.aten

# Operations whose result's shape or value the host needs, so that they wait for the device.
WAITING = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
_INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
# Functions that read a tensor's memory without an operation, or create a tensor from host data
# without `transfer.upload`.
_ASIDE = ((Tensor, "tolist"), (Tensor, "numpy"), (Tensor, "__array__"), (torch, "tensor"))


class WaitsError(AssertionError):
    """A step would have waited for a GPU."""


class _NoWaiting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        # Reads inside of a kernel are allowed; they differ between devices.
        self.in_operation = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in _INDEXING and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if func in WAITING or by_mask:
            raise WaitsError(f"{func}{' by a mask' if by_mask else ''} waits for the device")
        self.in_operation = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.in_operation = False


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make everything that would wait for a GPU raise :class:`WaitsError` on this thread."""
    thread, mode = threading.get_ident(), _NoWaiting()

    def refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and not mode.in_operation:
                raise WaitsError(f"{name} waits for the device")
            return function(*args, **kwargs)

        return refuse

    with pytest.MonkeyPatch.context() as patch, mode:
        for owner, name in _ASIDE:
            patch.setattr(owner, name, refusing(name, getattr(owner, name)))
        yield


def watch_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Watch all steps; returns a list of the finished ones and of what steps waited for.

    Rows are written and tokens are sampled as on a GPU, instead of in the CPU's own way.
    """
    seen: list[str] = []
    apply, compute = RowOwners.apply, StepComputer.compute

    @contextmanager
    def watched(name: str) -> Iterator[None]:
        try:
            with no_waiting():
                yield
        except WaitsError as error:
            seen.append(str(error))
            raise
        seen.append(name)

    def watched_apply(self: RowOwners, *args: Any) -> list[tuple[int, str]]:
        with watched("apply"):
            return apply(self, *args)

    def watched_compute(self: StepComputer, *args: Any, **kwargs: Any) -> StepOutput:
        with watched("compute"):
            output = compute(self, *args, **kwargs)
        with watched("copy_out"):
            return output.to_host()

    monkeypatch.setattr(transfer, "host_view", lambda tensor: None)
    monkeypatch.setattr(RowOwners, "apply", watched_apply)
    monkeypatch.setattr(StepComputer, "compute", watched_compute)
    monkeypatch.setattr(truncation, "kth_by_selection", truncation.kth_by_mass)
    monkeypatch.setattr(truncation, "lowest_by_pruning", truncation.lowest_by_mass)
    return seen


def watch_on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same by CUDA: every synchronization that torch knows of is an error."""
    seen: list[str] = []
    execute = Worker._execute

    def watched(self: Worker, *args: Any, **kwargs: Any) -> None:
        seen.append("execute")
        torch.cuda.set_sync_debug_mode("error")
        try:
            execute(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Worker, "_execute", watched)
    return seen
