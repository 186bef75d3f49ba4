"""Opens the device implementation for a torch device."""

from __future__ import annotations

import logging

import torch

from src.engine.devices.cuda import CudaDevice
from src.engine.devices.device import Device
from src.engine.devices.host import HostDevice

logger = logging.getLogger(__name__)


def open_device(device: torch.device) -> Device:
    """Open the device that computes on tensors of ``device``. The caller closes it."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def give_back_memory(device_type: str) -> None:
    """Return unused memory to the system, so that another engine can use it.

    Host memory is returned without this. On a GPU torch caches freed memory. May block for steps.
    """
    if device_type == "cuda":
        try:
            torch.cuda.empty_cache()
        # After a fault in a kernel every call fails.
        except RuntimeError as error:
            logger.warning("the device gives no memory back: %s", error)
