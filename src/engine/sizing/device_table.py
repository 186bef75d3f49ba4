"""Descriptions of devices: how much memory they have, and what limits their speed.

`NAMED_DEVICES` is the one table of devices that need not be here. The host describes itself, by a
measurement of a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import torch

from src.core.config import GIB
from src.core.cpus import usable_cpus
from src.core.errors import ConfigError
from src.core.host_memory import available_memory
from src.engine.devices import give_back_memory
from src.engine.sizing.roofline import measure

HOST: Final = "cpu"
# Bytes that CUDA's context takes of a GPU before anything is allocated. Its libraries load their
# kernels into it.
_CONTEXT: Final = GIB // 2


@dataclass(frozen=True)
class DeviceDescription:
    """A device, here or elsewhere.

    Attributes
    ----------
    kind
        ``cpu`` or ``cuda``.
    free
        Bytes that are free before a model is loaded.
    bandwidth
        Bytes per second that can be read from its memory.
    flops
        Floating-point operations per second by dtype, in matrix products without sparsity.
    """

    name: str
    kind: str
    free: int
    bandwidth: float
    flops: Mapping[str, float] = field(default_factory=dict)

    @property
    def torch_device(self) -> torch.device:
        """As torch names the kind of device; it need not be here."""
        return torch.device(self.kind)


def _gpu(name: str, gib: float, terabytes: float, half: float, single: float) -> DeviceDescription:
    """A GPU: memory in GiB as CUDA reports it, TB/s, TFLOP/s of 16-bit formats and of float32."""
    rates = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}
    return DeviceDescription(
        name, "cuda", int(gib * GIB) - _CONTEXT, terabytes * 1e12, MappingProxyType(rates)
    )


# Bandwidth and rates are those of NVIDIA's data sheets: SXM boards where there are several, tensor
# cores with sums in float32, no sparsity, no power limit. float32 is not rounded to TF32.
NAMED_DEVICES: Final[Mapping[str, DeviceDescription]] = MappingProxyType(
    {
        each.name: each
        for each in (
            _gpu("a100-80gb", 79.1, 2.039, 312, 19.5),
            _gpu("h100-80gb", 79.1, 3.35, 989, 67),
            _gpu("h200", 139.7, 4.8, 989, 67),
            _gpu("l4", 22.0, 0.3, 121, 30.3),
            _gpu("rtx4090", 23.6, 1.008, 165, 82.6),
        )
    }
)


def kind_of(name: str) -> str:
    """What torch calls the kind of device with a name of `describe_device`."""
    if name in NAMED_DEVICES:
        return NAMED_DEVICES[name].kind
    is_gpu = torch.cuda.is_available() if name == "auto" else name == "cuda"
    return "cuda" if is_gpu else "cpu"


def describe_device(name: str, dtype: torch.dtype, num_threads: int = 0) -> DeviceDescription:
    """The device with a name: ``auto`` and ``cuda`` are here, ``cpu`` is this machine.

    Parameters
    ----------
    dtype
        The format whose rate is measured where the device is here.
    num_threads
        Of the host's products; 0: as many as CPUs.

    Raises
    ------
    ConfigError
        There is no such device; the message lists those that there are.
    """
    if name in NAMED_DEVICES:
        return NAMED_DEVICES[name]
    if name not in ("auto", "cuda", HOST):
        raise ConfigError(
            f"device {name!r} is not known: take {HOST} (this machine), cuda (its GPU), "
            + ", ".join(NAMED_DEVICES)
        )
    on_cuda = kind_of(name) == "cuda"
    if on_cuda and not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device here: name one, for example h100-80gb")
    return _gpu_here(dtype) if on_cuda else _host(dtype, num_threads)


def _host(dtype: torch.dtype, num_threads: int) -> DeviceDescription:
    free = available_memory()
    with _threads(num_threads or usable_cpus()):
        limits = measure(torch.device("cpu"), dtype)
    rates = {_name(dtype): limits.flops}
    return DeviceDescription(f"{HOST} (this machine)", "cpu", free, limits.bandwidth, rates)


def _gpu_here(dtype: torch.dtype) -> DeviceDescription:
    device = torch.device("cuda")
    limits = measure(device, dtype)
    give_back_memory("cuda")
    free = torch.cuda.mem_get_info(device)[0]
    name = torch.cuda.get_device_name(device)
    return DeviceDescription(name, "cuda", free, limits.bandwidth, {_name(dtype): limits.flops})


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
