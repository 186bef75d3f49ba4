"""Describes a compilation ahead of time, for the worker process and for the cache."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch

from src.ops.build.levels import cpu_flags

# Version of the files that the worker writes and the loader reads.
_FORMAT: Final = 3
_PACKAGE: Final = Path(__file__).parent
_COMPILER: Final = (
    "compiler_program.py",
    "job.py",
    "replace_torch_shims.py",
    "replace_openmp.py",
    "worker.py",
)
# Prefixes of variables that change the code that Inductor generates. They are passed on to the
# worker and are part of the cache key. A variable that has no effect only costs a compilation.
_VARIABLES: Final = (
    "AOTINDUCTOR_",
    "AOT_INDUCTOR_",
    "ATEN_CPU_CAPABILITY",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
)
# These only set directories and parallelism.
_WITHOUT_EFFECT: Final = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"})

OPTIONS: Final[Mapping[str, Any]] = {
    # The wrapper only makes calls, but unoptimized, each goes through methods of many small
    # classes: a ninth of a step with one stream of a small model. Higher levels gain nothing.
    "aot_inductor.compile_wrapper_opt_level": "O1",
    "aot_inductor.enable_line_tables": False,
    # Precompiled headers do not pay off for four functions; workers would wait for each other's,
    # and the openssl command would be needed.
    "aot_inductor.precompile_headers": False,
}
"""Options of Inductor; options that this torch does not know are left out."""


class TensorMeta(NamedTuple):
    """Shape, strides and dtype of a tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """The metadata of a tensor on any device, including `meta`."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True)
class Job:
    """One function and everything that its code depends on.

    Attributes
    ----------
    function
        ``module:name`` of a pure function on tensors.
    arguments
        As in a call, with a `TensorMeta` for each tensor. Tuples may be nested. Other values become
        constants of the compiled code, and their `repr` must describe them completely.
    token_arguments
        Positions of the arguments whose dimension 0 counts tokens; the count may be 0.
    calls
        ``module:name`` of functions that are called through the constants.
    """

    function: str
    arguments: tuple[Any, ...]
    token_arguments: tuple[int, ...]
    calls: tuple[str, ...] = ()
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self._digest())

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        token_arguments: tuple[int, ...],
        calls: Sequence[Callable[..., Any]] = (),
    ) -> Job:
        """The job of ``function`` with such arguments, which may be meta tensors."""
        names = tuple(dict.fromkeys(_name(called) for called in calls))
        return cls(_name(function), without_data(arguments), token_arguments, names)

    def resolve(self) -> Callable[..., Any]:
        """Import the function."""
        function: Callable[..., Any] = resolve(self.function)
        return function

    def _digest(self) -> str:
        digest = hashlib.sha256()
        parts = [
            repr((_FORMAT, self, dict(OPTIONS))),
            f"{torch.__version__} {torch.version.git_version}",
            " ".join((platform.system(), platform.machine(), *sorted(cpu_flags()))),
            repr(_variables()),
        ]
        texts = [part.encode() for part in parts]
        texts += [path.read_bytes() for path in self._files()]
        for text in texts:
            digest.update(len(text).to_bytes(8, "little") + text)
        return digest.hexdigest()[:24]

    def _files(self) -> list[Path]:
        """Source files of all that is called, by methods of the arguments too."""
        called = [self.resolve(), *map(resolve, self.calls), *_classes(self.arguments)]
        return sorted({path for each in dict.fromkeys(called) for path in _sources(each)})


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _variables() -> list[tuple[str, str]]:
    return sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and name not in _WITHOUT_EFFECT
    )


def resolve(name: str) -> Any:
    """Import the object that ``module:name`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def flatten(arguments: Any, is_leaf: Callable[[Any], bool]) -> Iterator[Any]:
    """The leaves of nested tuples, in order; other values are skipped."""
    if is_leaf(arguments):
        yield arguments
    elif isinstance(arguments, tuple):
        for item in arguments:
            yield from flatten(item, is_leaf)


def substitute(arguments: Any, is_leaf: Callable[[Any], bool], values: Iterator[Any]) -> Any:
    """The nested tuples with each leaf replaced by the next of ``values``."""
    if is_leaf(arguments):
        return next(values)
    if not isinstance(arguments, tuple):
        return arguments
    items = [substitute(item, is_leaf, values) for item in arguments]
    return type(arguments)(*items) if hasattr(arguments, "_fields") else tuple(items)


def is_meta(value: Any) -> bool:
    """Whether the value stands for a tensor."""
    return isinstance(value, TensorMeta)


def is_tensor(value: Any) -> bool:
    """Whether the value is a tensor."""
    return isinstance(value, torch.Tensor)


def without_data(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with a `TensorMeta` for each tensor."""
    metas = (TensorMeta.of(tensor) for tensor in flatten(arguments, is_tensor))
    bare: tuple[Any, ...] = substitute(arguments, is_tensor, metas)
    return bare


def repeats(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Per tensor the index of the first one that is the same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(each), index) for index, each in enumerate(tensors))


def _classes(value: Any) -> Iterator[type]:
    """Those of nested tuples with fields: functions call their methods, and import none of them."""
    if not isinstance(value, tuple) or is_meta(value):
        return
    if type(value) is not tuple:
        yield type(value)
    for item in value:
        yield from _classes(item)


def _sources(function: Callable[..., Any]) -> list[Path]:
    """Source files of the package of a function or a class that its module depends on.

    And those of the worker.
    """
    package = function.__module__.partition(".")[0]
    names, pending = set[str](), [function.__module__]
    while pending:
        name = pending.pop()
        if name in names or name.partition(".")[0] != package or name not in sys.modules:
            continue
        names.add(name)
        for attribute, value in vars(sys.modules[name]).items():
            if not isinstance(value, ModuleType):
                owner = _owner(value)
            elif value.__name__ == f"{name}.{attribute}":
                # A submodule is an attribute as soon as any code imports it: no real dependency.
                continue
            else:
                owner = value.__name__
            if owner is not None:
                pending.append(owner)
    files = {inspect.getsourcefile(sys.modules[name]) for name in names}
    reached = {Path(file) for file in files if file is not None}
    return sorted(reached | {_PACKAGE / name for name in _COMPILER})


def _owner(value: Any) -> str | None:
    owner = getattr(value, "__module__", None)
    return owner if isinstance(owner, str) else None
