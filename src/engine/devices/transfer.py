"""Small host-to-device copies that never wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(values: Sequence[int] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy ``values`` to ``device`` without waiting for it.

    On CUDA the source is a fresh pinned temporary. Torch's pinned allocator keeps it until the copy
    has run, so this works for any pipeline depth.
    """
    if device.type == "cpu":
        return torch.as_tensor(values, dtype=dtype)
    staged = torch.as_tensor(values, dtype=dtype)
    if device.type == "meta":
        # A step of which only the shapes are computed.
        return staged.to(device)
    return staged.pin_memory().to(device, non_blocking=True)


def host_view(tensor: Tensor) -> np.ndarray | None:
    """A numpy view of host memory, for small writes between two steps; ``None`` on a GPU.

    For each write torch releases the interpreter lock, and then waits until the event loop releases
    it, often a whole turn later. numpy keeps the lock.
    """
    return tensor.numpy() if tensor.device.type == "cpu" else None


def upload_into(destination: Tensor, values: np.ndarray) -> None:
    """Copy ``values`` over ``destination``, of the same shape, without waiting for it."""
    staged = torch.from_numpy(values)
    if destination.device.type != "cpu":
        staged = staged.pin_memory()
    destination.copy_(staged, non_blocking=True)
