"""Stands in for an sm_90 GPU while Inductor compiles for it: all but what runs there.

Tensors are fake, so what a compiled function calls has its shapes and nothing else. Triton's
programs are compiled to machine code, and neither loaded nor launched. It patches the process, so
it is for programs of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.codecache import PyCodeCache
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from tests.support.fake_cuda import load_guard

HOPPER = GPUTarget("cuda", 90, 32)
DEVICE = torch.device("cuda:0")
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    L2_cache_size=50 << 20,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    total_memory=141 << 30,
    warp_size=32,
    gcnArchName="",
)

CALLS: list[tuple[str, tuple[Any, ...]]] = []
"""Name and arguments of whatever would have run on the device, in order."""


class HopperKernel:
    """A compiled program of Triton's, which is not launched."""

    def __init__(self, name: str, compiled: Any) -> None:
        self.name = name
        self.signature: dict[str, str] = compiled.triton_meta["signature"]

    def run(self, *arguments: Any, stream: int) -> None:
        CALLS.append((self.name, arguments))


KERNELS: list[HopperKernel] = []
"""In the order in which they were compiled."""
_compiles_kernels = True


class _Nothing:
    """A context that changes nothing."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


class _Driver:
    """Of Triton's, for whoever asks what to compile for."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda


def _first_device(*arguments: Any) -> int:
    return 0


def _nothing(*arguments: Any, **options: Any) -> None:
    pass


def _yes(*arguments: Any, **options: Any) -> bool:
    return True


def _properties(*arguments: Any) -> SimpleNamespace:
    return _PROPERTIES


def _compile(self: Any, name: str, source: str, device_str: str = "cuda") -> HopperKernel:
    compiled = getattr(PyCodeCache.load(source), name)
    if _compiles_kernels:
        compiled.precompile(warm_cache_only=True)
    KERNELS.append(HopperKernel(name, compiled))
    return KERNELS[-1]


def _product(name: str) -> Any:
    def run(*arguments: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        *summands, left, right = arguments
        assert left.shape[1] == right.shape[0]
        assert out.shape == (left.shape[0], right.shape[1])
        for summand in summands:
            torch.broadcast_shapes(summand.shape, out.shape)
        CALLS.append((name, arguments))

    return run


def install(*, with_triton: bool = True) -> None:
    """Have this process believe in the device; `with_triton` its kernels are compiled."""
    global _compiles_kernels
    _compiles_kernels = with_triton
    if not torch.backends.cuda.is_built():
        load_guard()
    # Asked for the device, which torch itself (unlike Inductor) must not believe in.
    for where in (torch.cuda, CudaInterface, CudaInterface.Worker):
        where.current_device = _first_device
        where.get_device_properties = _properties
        where.set_device = _nothing
    for where in (torch.cuda, CudaInterface):
        where.is_bf16_supported = _yes
        where.synchronize = _nothing
        where.device = _Nothing
    torch.cuda._DeviceGuard = _Nothing
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = _nothing
    torch.accelerator.is_available = lambda: False
    CudaInterface.is_available = _yes
    CudaInterface.get_compute_capability = lambda *_: HOPPER.arch
    CudaInterface.exchange_device = CudaInterface.maybe_exchange_device = _first_device
    CudaInterface.get_raw_stream = torch._C._cuda_getCurrentRawStream = _first_device
    triton.runtime.driver.set_active(_Driver())
    _install_in_inductor()


def _install_in_inductor() -> None:
    import torch._inductor.async_compile
    import torch._inductor.config
    import torch._inductor.fx_passes.fuse_attention
    import torch._inductor.fx_passes.misc_patterns
    import torch._inductor.kernel.mm
    import torch._inductor.runtime.triton_helpers
    from torch._inductor.select_algorithm import extern_kernels

    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device=DEVICE
    )
    guards._reinterpret_tensor = lambda tensor, size, stride, offset=0: tensor.as_strided(
        size, stride, tensor.storage_offset() + offset
    )
    # It computes constants on the device.
    torch._inductor.config.joint_graph_constant_folding = False
    torch._inductor.runtime.triton_helpers.set_driver_to_gpu = _nothing
    torch._inductor.async_compile.AsyncCompile.triton = _compile
    # Patterns of torch's own are traced on real tensors of the device.
    torch._inductor.fx_passes.fuse_attention._sfdp_init = _nothing
    torch._inductor.fx_passes.misc_patterns._misc_patterns_init = _nothing
    for name in ("mm", "addmm"):
        setattr(extern_kernels, name, _product(name))


class _NothingElse(TorchDispatchMode):
    """Torch's own operations on the device are errors, but for memory and views of it.

    Ops of our own are called by name, and recorded here.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.namespace == "slipstream":
            CALLS.append((func._schema.name, args))
            return func(*args, **(kwargs or {}))
        assert func.is_view or "empty" in str(func), func
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded(*, alone: bool) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """What would run on the device meanwhile; with ``alone`` there may be nothing else."""
    CALLS.clear()
    seen: list[tuple[str, tuple[Any, ...]]] = []
    with _NothingElse() if alone else contextlib.nullcontext():
        yield seen
    seen.extend(CALLS)
