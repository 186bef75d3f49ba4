"""CUDA tensors without CUDA: shapes, dtypes and devices, and checks for waiting on the device.

For use in separate programs, because it patches the process. Reading a value that only the device
has (`item`, `nonzero`, indexing by a mask) raises, as torch's fake tensors do.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda:0")
# Torch needs a device guard before copies, even of fake tensors; CPU builds have none for CUDA.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
}
"""


class NobodyWaits(TorchDispatchMode):
    """Inside of `fake_cuda`: blocking copies and operations across devices are errors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        given = kwargs or {}
        out = func(*args, **given)
        names = [argument.name for argument in func._schema.arguments]
        copies = "non_blocking" in names
        if copies:
            values = {**dict(zip(names, args, strict=False)), **given}
            copies = bool(values.get("non_blocking", False))
        every = tree_leaves((args, given, out))
        # 0-dimensional tensors are passed with the launch.
        devices = {each.device for each in every if isinstance(each, Tensor) and each.dim()}
        if len(devices) > 1 and not copies:
            where = "".join(traceback.format_stack(limit=12))
            raise AssertionError(f"{func} waits for the device:\n{where}")
        return out


def load_guard() -> None:
    """Register a guard of CUDA devices that guards nothing. Takes a compiler some seconds."""
    torch_root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "guard.cpp"), Path(directory, "guard.so")
        source.write_text(_GUARD)
        subprocess.run(
            [
                *("g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)),
                *("-I", str(torch_root / "include"), "-L", str(torch_root / "lib"), "-lc10"),
            ],
            check=True,
        )
        torch.ops.load_library(str(library))


def _without_constant(make: Any) -> Any:
    """Prevent torch from computing with known values of device tensors; there is no device."""

    def made(*arguments: Any, **options: Any) -> Any:
        tensor = make(*arguments, **options)
        if hasattr(tensor, "constant"):
            tensor.constant = None
        return tensor

    return made


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Make all tensors fake, on any device."""
    if not torch.backends.cuda.is_built():
        load_guard()
    torch.as_tensor = _without_constant(torch.as_tensor)
    torch.from_numpy = _without_constant(torch.from_numpy)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[assignment, method-assign]
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def main() -> None:
    """Self-test: each of these must be detected."""
    with fake_cuda(), NobodyWaits():
        value = torch.zeros(3, device=DEVICE)
        value.to("cpu", non_blocking=True)
        host = torch.zeros(2, dtype=torch.int64)
        for waits in (
            lambda: value.to("cpu"),
            lambda: value.sum().item(),
            lambda: value[host],
            lambda: host.to(DEVICE),
            lambda: value + torch.zeros(3),
        ):
            try:
                waits()
            except Exception as error:
                sys.stdout.write(f"{type(error).__name__}\n")
            else:
                sys.stdout.write("unnoticed\n")


if __name__ == "__main__":
    main()
