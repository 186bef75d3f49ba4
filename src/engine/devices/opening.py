"""Which device a tensor's device is."""

from __future__ import annotations

import logging

import torch

from src.engine.devices.cuda import CudaDevice
from src.engine.devices.device import Device
from src.engine.devices.host import HostDevice

logger = logging.getLogger(__name__)


def open_device(device: torch.device) -> Device:
    """The device that computes on tensors of ``device``; close it."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def give_back_memory(device_type: str) -> None:
    """Give the system what nothing refers to any more, so that another engine may have it.

    Of host memory nothing is kept. torch keeps a GPU's for itself. May block for its steps.
    """
    if device_type == "cuda":
        try:
            torch.cuda.empty_cache()
        # After a fault in a kernel every call fails.
        except RuntimeError as error:
            logger.warning("the device gives no memory back: %s", error)
