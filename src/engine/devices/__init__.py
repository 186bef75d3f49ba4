"""How steps run on one kind of device: on the host itself, or queued on an accelerator.

`device` is the protocol; `host` and `cuda` implement it. The worker knows only the protocol.
"""

from src.engine.devices.device import Device, HostCopyable, StepSpan
from src.engine.devices.opening import give_back_memory, open_device

__all__ = ["Device", "HostCopyable", "StepSpan", "give_back_memory", "open_device"]
