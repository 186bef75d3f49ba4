"""One declaration per op: its name, schema, reference, kernels and cost.

An [`Op`][src.ops.declaration.Op] is written once. From it come the registration with
torch (namespace `slipstream`), the tests (every kernel against the reference over
`cases`, `opcheck`, eager against compiled) and the benchmark (achieved bytes/s and FLOP/s).

Dispatch is one attribute read. Each device type has one active kernel; replacing it is one
reference assignment. So a library built by a background thread takes over between two calls, never
during one. Where callers may want different kernels, each call carries the handle of its caller's
[`Backend`][src.ops.declaration.Backend]; there is no process-wide choice.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import library

NAMESPACE = "slipstream"

Case = Mapping[str, Any]
"""One point of an op's parameter grid, as keyword arguments of its input builder."""

_log = logging.getLogger(__name__)
_library = library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True, slots=True)
class Kernel:
    """An implementation: `run` takes exactly the op's arguments, in schema order."""

    name: str
    run: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Cost:
    """The minimal work of a call: bytes moved to and from memory, and floating-point operations."""

    bytes: int
    flops: int


class Backend:
    """A caller's own choice of the kernel that serves its calls of an op.

    The choice holds as long as the caller keeps this object. Each call carries the number `handle`,
    so several callers in one process do not affect each other. Captured and compiled calls keep the
    handle too.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.handle = next(_handles)
        _backends[self.handle] = self


_handles = itertools.count(1)
_backends: weakref.WeakValueDictionary[int, Backend] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class OpKernel:
    """A kernel that a plugin brings: it serves the op's calls on a device type in this process.

    Attributes
        op: The op's name inside the namespace, e.g. `gumbel_argmax`.
        device_type: `cpu` or `cuda`.
        name: What logs call the kernel.
        run: Takes exactly the op's arguments, in schema order, without `backend`.
    """

    op: str
    device_type: str
    name: str
    run: Callable[..., Any]


class Op:
    """A custom op with its meaning (the reference), its kernels, its cases and its cost.

    Parameters
        name: Op name inside the namespace.
        signature: Schema without the name, e.g. `(Tensor x, Tensor(a!) out) -> ()`. The arguments
            written `Tensor(a!)` are the mutated ones; an op never returns an alias of an argument.
        reference: Plain torch, on any device. It defines the result.
        fake: Shapes and dtypes only, for tracing.
        build: Makes the arguments of one case: `build(device, **case)`.
        cases: The grid that the kernels are tested over.
        cost: Minimal bytes and FLOPs of a call with these arguments.
        lazy: Device type -> where its kernel lives (`"module:attribute"`). It is imported at the
            first call on that device type, so that a CPU process never imports Triton. A device
            type without an entry is served by the reference.
        takes_backend: Whether the signature ends with `int backend=0`: the handle of the
            [`Backend`][src.ops.declaration.Backend] that serves the call, or 0 for the device's
            kernel. Kernels get the arguments before it.
    """

    def __init__(
        self,
        name: str,
        signature: str,
        *,
        reference: Callable[..., Any],
        fake: Callable[..., Any],
        build: Callable[..., tuple[Any, ...]],
        cases: Sequence[Case],
        cost: Callable[..., Cost],
        lazy: Mapping[str, str] | None = None,
        takes_backend: bool = False,
    ) -> None:
        self.name = name
        self.reference = reference
        self.build = build
        self.cases = tuple(cases)
        self.cost = cost
        self._lazy = dict(lazy or {})
        self._reference_kernel = Kernel("reference", reference)
        self._cpu = self._reference_kernel
        # What would serve CPU calls if a plugin's kernel did not.
        self._below: Kernel | None = None
        self._takes_backend = takes_backend
        self._unresolved = Kernel("unresolved", self._resolve_cuda)
        self._cuda = self._unresolved
        self._plugged_cuda: Kernel | None = None
        _library.define(
            name + signature,
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
        )
        qualified = f"{NAMESPACE}::{name}"
        # The lambdas read the active kernel at call time, so replacing it needs no registration.
        on_cpu = lambda *args: self._cpu.run(*args)  # noqa: E731
        on_cuda = lambda *args: self._cuda.run(*args)  # noqa: E731
        _library.impl(name, self._by_backend(on_cpu) if takes_backend else on_cpu, "CPU")
        _library.impl(name, self._by_backend(on_cuda) if takes_backend else on_cuda, "CUDA")
        library.register_fake(qualified, fake, lib=_library)
        self.overload: torch._ops.OpOverload = getattr(torch.ops.slipstream, name).default

    @property
    def mutated(self) -> tuple[str, ...]:
        """Names of the arguments that a call changes, read off the schema."""
        return tuple(
            argument.name
            for argument in self.overload._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        )

    def install_cpu(self, kernel: Kernel) -> None:
        """Serve CPU calls with `kernel` from the next call on, unless a plugin's serves them."""
        if self._below is None:
            self._cpu = kernel
        else:
            self._below = kernel

    def uninstall_cpu(self) -> None:
        """Serve CPU calls with the reference again, unless a plugin's kernel serves them."""
        self.install_cpu(self._reference_kernel)

    def plug(self, device_type: str, kernel: Kernel) -> None:
        """Serve calls on a device type with a plugin's kernel, whatever else is installed.

        Raises
            ValueError: Another plugin's kernel serves them, or they cannot be served by one.
        """
        if device_type == "cpu":
            if self._below is None:
                self._below, self._cpu = self._cpu, kernel
            elif self._cpu != kernel:
                raise ValueError(f"{self.name} on the CPU is served by {self._cpu.name} already")
        elif device_type == "cuda":
            if self._takes_backend:
                raise ValueError(f"{self.name} on CUDA is served by what device.attention says")
            if self._plugged_cuda not in (None, kernel):
                raise ValueError(f"{self.name} on CUDA is served by {self._cuda.name} already")
            self._cuda = self._plugged_cuda = kernel
        else:
            raise ValueError(f"there is no device type {device_type!r}; there are: cpu, cuda")

    def load_cuda(self) -> Kernel:
        """The kernel that serves CUDA calls, imported now if no call has done that yet."""
        if self._cuda is self._unresolved:
            self._cuda = self._declared_cuda()
        return self._cuda

    def active(self, device_type: str) -> Kernel:
        """The kernel that would serve a call on this device type now."""
        return self._cuda if device_type == "cuda" else self._cpu

    def _by_backend(self, on_device: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            # torch omits trailing arguments that have their default value.
            if len(args) < len(self.overload._schema.arguments):
                return on_device(*args)
            *given, handle = args
            if handle == 0:
                return on_device(*given)
            backend = _backends.get(handle)
            if backend is None:
                raise LookupError(f"{self.name}: backend {handle} is not there any more")
            return backend.kernel.run(*given)

        return call

    def _resolve_cuda(self, *args: Any) -> Any:
        """First CUDA call: import the kernel and make it the active one."""
        return self.load_cuda().run(*args)

    def _declared_cuda(self) -> Kernel:
        if "cuda" not in self._lazy:
            return self._reference_kernel
        module, _, attribute = self._lazy["cuda"].partition(":")
        try:
            return Kernel("triton", getattr(importlib.import_module(module), attribute))
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            _log.warning("triton is not installed: %s runs its torch reference on CUDA", self.name)
            return self._reference_kernel
