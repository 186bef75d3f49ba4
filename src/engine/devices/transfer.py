"""Small host-to-device copies that never wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(values: Sequence[int] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy ``values`` to ``device`` without waiting for it.

    On CUDA the source is a fresh pinned temporary: torch's pinned allocator keeps it until the copy
    has run, so nobody has to know how deep the pipeline is.
    """
    if device.type == "cpu":
        return torch.as_tensor(values, dtype=dtype)
    staged = torch.as_tensor(values, dtype=dtype).pin_memory()
    return staged.to(device, non_blocking=True)


def host_view(tensor: Tensor) -> np.ndarray | None:
    """The same memory, if the host has it, for small writes between two steps.

    For each of them torch releases the interpreter lock, and waits until the event loop gives it
    back, which is often a whole turn later. numpy keeps it.
    """
    return tensor.numpy() if tensor.device.type == "cpu" else None


def upload_into(destination: Tensor, values: np.ndarray) -> None:
    """Copy ``values`` over ``destination``, of the same shape, without waiting for it."""
    staged = torch.from_numpy(values)
    if destination.device.type != "cpu":
        staged = staged.pin_memory()
    destination.copy_(staged, non_blocking=True)
