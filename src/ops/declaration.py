"""One declaration per op: its name, record, reference, kernels and cost.

An `Op` is written once. From it come the registration with torch (namespace `slipstream`), the
tests (every kernel against the reference over `cases`, `opcheck`, eager against compiled) and the
benchmark (achieved bytes/s and FLOP/s).

Dispatch is one attribute read. Each device type has one active kernel; replacing it is one
reference assignment. So a library built by a background thread takes over between two calls, never
during one. Where callers may want different kernels, each call carries the handle of its caller's
`Backend`; there is no process-wide choice.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import library

from src.ops.records import Record

NAMESPACE = "slipstream"
BACKEND = "backend"
"""The last field of ops whose callers choose a kernel: the handle of a `Backend`, or 0."""

Case = Mapping[str, Any]
"""One point of an op's parameter grid, as keyword arguments of its input builder."""

_log = logging.getLogger(__name__)
_library = library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True, slots=True)
class Kernel:
    """An implementation: `run` takes the op's flat arguments, without `backend`."""

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


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=Record)


@dataclass(frozen=True, slots=True)
class OpKernel:
    """A kernel that a plugin brings: it serves the op's calls on a device type in this process.

    Attributes
    ----------
    op
        The op's name inside the namespace, e.g. `gumbel_argmax`.
    device_type
        `cpu` or `cuda`.
    name
        What logs call the kernel.
    run
        Takes a call: the op's record, whose fields have the names of the op's arguments.
    """

    op: str
    device_type: str
    name: str
    run: Callable[..., Any]


class Op(Generic[P, R]):
    """A custom op with its meaning (the reference), its kernels, its cases and its cost.

    Calling it calls the op through torch, with the fields of its record as arguments.

    Parameters
    ----------
    name
        Op name inside the namespace.
    record
        The class of its calls. An op never returns an alias of an argument.
    reference
        Plain torch, on any device. It defines the result.
    fake
        Shapes and dtypes only, for tracing; None if the record says them.
    build
        Makes one case: `build(device, **case)`.
    cases
        The grid that the kernels are tested over.
    cost
        Minimal bytes and FLOPs of a call.
    lazy
        Device type -> where its kernel lives (`"module:attribute"`), a function of flat arguments.
        It is imported at the first call on that device type, so that a CPU process never imports
        Triton. A device type without an entry is served by the reference.

    Attributes
    ----------
    reference, build, cost
        As given, with flat arguments (see `Record`) in place of records.
    overload
        The op of torch, which takes flat arguments too.
    """

    def __init__(
        self,
        name: str,
        record: Callable[P, C],
        *,
        reference: Callable[[C], R],
        build: Callable[..., C],
        cases: Sequence[Case],
        cost: Callable[[C], Cost],
        fake: Callable[[C], R] | None = None,
        lazy: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        # A class is what is called; as such it is typed.
        self.record = cast("type[Record]", record)
        self.reference = self.record.taking_flat(reference)
        self.cost = self.record.taking_flat(cost)
        self.cases = tuple(cases)
        self._build = build
        self._lazy = dict(lazy or {})
        self._reference_kernel = Kernel("reference", self.reference)
        self._cpu = self._reference_kernel
        # What would serve CPU calls if a plugin's kernel did not.
        self._below: Kernel | None = None
        self._unresolved = Kernel("unresolved", self._resolve_cuda)
        self._cuda = self._unresolved
        self._plugged_cuda: Kernel | None = None
        _library.define(
            name + self.record.schema(),
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
        )
        # The lambdas read the active kernel at call time, so replacing it needs no registration.
        on_cpu = lambda *args: self._cpu.run(*args)  # noqa: E731
        on_cuda = lambda *args: self._cuda.run(*args)  # noqa: E731
        takes_backend = BACKEND in self.record.fields
        _library.impl(name, self._by_backend(on_cpu) if takes_backend else on_cpu, "CPU")
        _library.impl(name, self._by_backend(on_cuda) if takes_backend else on_cuda, "CUDA")
        traced = self.record.taking_flat(fake or Record.traced)
        library.register_fake(f"{NAMESPACE}::{name}", traced, lib=_library)
        self.overload: torch._ops.OpOverload = getattr(torch.ops.slipstream, name).default
        self.function: Callable[P, R] = self.record.passing(self.overload)
        """The op as a function of the record's fields."""

    def build(self, device: str, **case: Any) -> tuple[Any, ...]:
        """The flat arguments of a case, without those that a kernel is not given."""
        made = self._build(device, **case).flat()
        return made[:-1] if BACKEND in self.record.fields else made

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """What `build` takes for a case, by name."""
        return inspect.signature(self._build).parameters

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
        ------
        ValueError
            Another plugin's kernel serves them, or they cannot be served by one.
        """
        if device_type == "cpu":
            if self._below is None:
                self._below, self._cpu = self._cpu, kernel
            elif self._cpu != kernel:
                raise ValueError(f"{self.name} on the CPU is served by {self._cpu.name} already")
        elif device_type == "cuda":
            if BACKEND in self.record.fields:
                raise ValueError(f"{self.name} on CUDA is served by what device.attention says")
            if self._plugged_cuda not in (None, kernel):
                raise ValueError(f"{self.name} on CUDA is served by {self._cuda.name} already")
            self._cuda = self._plugged_cuda = kernel
        else:
            raise ValueError(f"there is no device type {device_type!r}; there are: cpu, cuda")

    def load_cuda(self) -> Kernel:
        """The kernel that serves CUDA calls, imported now if no call has done that yet."""
        if self._cuda is self._unresolved:
            found = self._declared_cuda()
            # A plugin may have come during the import.
            self._cuda = self._plugged_cuda or found
        return self._cuda

    def active(self, device_type: str) -> Kernel:
        """The kernel that would serve a call on this device type now."""
        return self._cuda if device_type == "cuda" else self._cpu

    def _by_backend(self, on_device: Callable[..., Any]) -> Callable[..., Any]:
        num_flat = len(self.record.flat_parameters())

        def call(*args: Any) -> Any:
            # torch omits trailing arguments that have their default value.
            if len(args) < num_flat:
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
            name = "triton" if module.endswith("_triton") else "torch"
            return Kernel(name, getattr(importlib.import_module(module), attribute))
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            _log.warning("triton is not installed: %s runs its torch reference on CUDA", self.name)
            return self._reference_kernel
