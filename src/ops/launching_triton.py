# Kernels of Triton have no types.
# mypy: disable-error-code="no-untyped-def"
"""Launches Triton kernels without asking Triton again which variant serves.

For each launch Triton binds the arguments, finds the class of each, makes a key of classes and
options as a text, and looks a compiled kernel up by it. With twenty arguments that takes the host
longer than a small kernel runs. A `launcher` keeps what was compiled by a key of its own, which
tells all arguments apart that Triton tells apart:

- of a tensor its dtype, and whether its address is a multiple of 16 where Triton asks for that;
- of a number its type and its value, or, where it selects no variant, whether it fits 32 bits;
- constants and launch options, by value.

What is not found there is launched through Triton, which compiles it if it has to. So are all
launches in Triton's interpreter, and while somebody has hooks on launches, such as a profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_MOST_KEPT = 1024
"""More variants than any model has; they are dropped if an argument has ever new values."""
_ON_HOST = object()
"""In a key: in place of the dtype of a tensor of the host."""

Launch = Callable[..., None]


def ceil_div(number: int, by: int) -> int:
    """`number / by`, rounded up. (`triton.cdiv` looks at each argument for longer.)"""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()


class _Kept:
    """The compiled variants of one kernel, by the launcher's keys."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        # The last is the kernel itself, whose code newer Tritons unload when it is gone.
        self.variants: dict[tuple[Any, ...], tuple[Callable[..., None], Any, Any, Any]] = {}

    def through_triton(
        self,
        key: tuple[Any, ...],
        grid: tuple[int, ...],
        given: tuple[Any, ...],
        options: tuple[Any, ...],
    ) -> None:
        """Launch as Triton does, and keep what it launched."""
        named = {
            name: value for name, value in zip(_OPTIONS, options, strict=True) if value is not None
        }
        made = self.kernel[grid](*given, **named)
        # Triton itself refuses memory of the host, so that is shown to it each time.
        if not isinstance(made, CompiledKernel) or _ON_HOST in key:
            return
        if len(self.variants) >= _MOST_KEPT:
            self.variants.clear()
        self.variants[key] = (made.run, made.function, made.packed_metadata, made)


def launcher(kernel: Any) -> Launch:
    """A function that launches `kernel`: it takes a grid, then the kernel's arguments and options.

    The grid has one to three sizes. Arguments may have names. The first launch tells tensors from
    numbers; a tensor may be None in any.
    """
    made: Launch | None = None

    def launch(grid: tuple[int, ...], *given: Any, **named: Any) -> None:
        nonlocal made
        if made is None:
            # One of the interpreter has no parameters to look at.
            made = _written(kernel, given, named) if isinstance(kernel, JITFunction) else through
        made(grid, *given, **named)

    def through(grid: tuple[int, ...], *given: Any, **named: Any) -> None:
        kernel[grid](*given, **named)

    return launch


def _written(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    """The function that launches a kernel, written for its parameters."""
    names = [each.name for each in kernel.params]
    first = dict(zip(names, given, strict=False)) | named
    lines, key, passed = [], ["_device"], []
    for each in kernel.params:
        name = each.name
        if each.is_constexpr:
            key.append(name)
            passed.append(name)
        elif first[name] is None or isinstance(first[name], Tensor):
            aligned = not (each.do_not_specialize or each.do_not_specialize_on_alignment)
            lines += [
                f"if {name} is None:",
                f"    _at_{name} = _kind_{name} = _aligned_{name} = None",
                "else:",
                f"    _at_{name} = {name}.data_ptr()",
                f"    _kind_{name} = {name}.dtype if {name}.is_cuda else _on_host",
                *([f"    _aligned_{name} = _at_{name} & 15 == 0"] if aligned else ()),
            ]
            key += [f"_kind_{name}", *([f"_aligned_{name}"] if aligned else ())]
            passed.append(f"_at_{name}")
        else:
            fits = f"(-2147483648 <= {name} <= 2147483647) or {name}"
            key += [f"{name}.__class__", fits if each.do_not_specialize else name]
            passed.append(name)
    parameters = ", ".join((*names, *(f"{name}=None" for name in _OPTIONS)))
    options = ", ".join(_OPTIONS)
    text = "\n    ".join(
        (
            f"def _launch(_grid, {parameters}):",
            "_device = _device_of()",
            *lines,
            f"_key = ({', '.join(key)}, {options})",
            "_found = _variants.get(_key)",
            "if _found is None or _begins.calls or _ends.calls:",
            f"    return _through_triton(_key, _grid, ({', '.join(names)},), ({options},))",
            "_run, _function, _metadata, _ = _found",
            "_x, _y, _z = (*_grid, 1, 1)[:3]",
            "_run(_x, _y, _z, _stream_of(_device), _function, _metadata, None, None, None, "
            f"{', '.join(passed)})",
        )
    )
    kept = _Kept(kernel)
    device_of, stream_of = _current()
    scope = {
        "_variants": kept.variants,
        "_through_triton": kept.through_triton,
        "_on_host": _ON_HOST,
        "_begins": triton.knobs.runtime.launch_enter_hook,
        "_ends": triton.knobs.runtime.launch_exit_hook,
        "_device_of": device_of,
        "_stream_of": stream_of,
    }
    exec(text, scope)
    made: Launch = scope["_launch"]
    return made


def _current() -> tuple[Callable[[], int], Callable[[int], int]]:
    """What tells the current device, and a device's current stream."""
    # `torch.cuda.current_device` without its look at whether CUDA has begun: it has.
    return torch._C._cuda_getDevice, triton.runtime.driver.active.get_current_stream
