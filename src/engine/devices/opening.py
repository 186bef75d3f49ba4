"""Which device a tensor's device is."""

from __future__ import annotations

import torch

from src.engine.devices.cuda import CudaDevice
from src.engine.devices.device import Device
from src.engine.devices.host import HostDevice


def open_device(device: torch.device) -> Device:
    """The device that computes on tensors of ``device``; close it."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()
