"""Calls code that AOTInductor compiled ahead of time, through the kernel library (`compiled.cpp`).

ctypes releases the GIL for the whole call; torch's own loader of such code holds it. Weights are
bound once, so a call passes only what changes from step to step.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from src.ops.runtime.abi import MAX_DIMS, MAX_WRITES, BoundInput, StepContext

# In the order of TorchFunctions.
_TORCH_FUNCTIONS: Final = (
    "aoti_torch_new_tensor_handle",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_empty_strided",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dtype",
)
_TORCH_LIBRARY: Final = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_DTYPES: Final = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
}
COMPILED_FAILED: Final = 6
"""Status of the library: compiled code failed; the code itself holds the message."""


class CompiledCodeError(RuntimeError):
    """Code that was compiled ahead of time cannot be loaded, or it failed."""


class Caller:
    """The kernel library as the caller of compiled code, and as the provider of its ops.

    Parameters
    ----------
    path
        The library that serves the ops. This makes its symbols global, so that code loaded later
        finds the ops' C functions.
    num_threads
        Threads of its kernels, and of the loops of the code that it calls.

    Raises
    ------
    CompiledCodeError
        This torch lacks a part of the C interface.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        self.num_threads = num_threads
        try:
            self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            torch_library = ctypes.CDLL(str(_TORCH_LIBRARY))
            functions = [
                ctypes.cast(getattr(torch_library, name), ctypes.c_void_p).value
                for name in _TORCH_FUNCTIONS
            ]
            self.dtype_codes = {
                dtype: int(getattr(torch_library, f"aoti_torch_dtype_{name}")())
                for dtype, name in _DTYPES.items()
            }
        except (OSError, AttributeError) as error:
            raise CompiledCodeError(f"{path}: {error}") from error
        self._library.slipstream_use_torch((ctypes.c_void_p * len(functions))(*functions))
        self._bind: Any = self._library.slipstream_bind
        self._bind.restype = ctypes.c_void_p
        self._bind.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.POINTER(BoundInput),
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
        )
        self.unbind: Any = self._library.slipstream_unbind
        self.unbind.argtypes = (ctypes.c_void_p,)
        self.call: Any = self._library.slipstream_call
        self.call.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p)
        self.step: Any = self._library.slipstream_step
        self.step.argtypes = (
            ctypes.POINTER(StepContext),
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            *(ctypes.c_void_p,) * 5,
        )
        self.step_call = self.step_function("call")
        # These return at once, so releasing the GIL for them would cost more than it gains.
        quick = ctypes.PyDLL(str(path))
        self.new_gate: Any = quick.slipstream_new_gate
        self.new_gate.restype = ctypes.c_void_p
        self.delete_gate: Any = quick.slipstream_delete_gate
        self.delete_gate.argtypes = (ctypes.c_void_p,)
        self.open_gate: Any = quick.slipstream_open_gate
        self.open_gate.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
            *(ctypes.c_void_p, ctypes.c_int64),
        )

    def step_function(self, name: str) -> int:
        """Address of the function that runs instructions of a kind, see `step_mixers.cpp`."""
        function = getattr(self._library, f"slipstream_step_{name}")
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        return address

    def bind(self, code: CompiledCode, inputs: Sequence[Tensor | None]) -> Bound:
        """Bind the weights of a call; None stands for a token argument.

        Raises
        ------
        CompiledCodeError
            A weight has more dimensions than supported.
        """
        weights = [tensor for tensor in inputs if tensor is not None]
        handles = iter(_handles(weights))
        given = (BoundInput * len(inputs))()
        for number, (tensor, meta) in enumerate(zip(inputs, code.metas, strict=True)):
            given[number] = _described(self, meta)
            if tensor is not None:
                given[number].handle = next(handles)
        address = self._bind(
            *(code.run_address, code.container, given, len(inputs), code.num_outputs),
            *(self.num_threads, code.has_own_tensors),
        )
        if address is None:
            raise CompiledCodeError("a weight has more dimensions than the kernel library takes")
        return Bound(self, code, address)


class CompiledCode:
    """One loaded artifact. It stays loaded for the life of the process.

    Parameters
    ----------
    path
        A shared library with AOTInductor's C interface.
    metas
        For each input: shape and dtype of a token argument (dimension 0 counts tokens), or None for
        a weight.
    has_own_tensors
        Whether it uses the kernel library's tensors instead of torch's.

    Raises
    ------
    CompiledCodeError
        The file is not such a library, or does not fit this torch.
    """

    def __init__(
        self,
        caller: Caller,
        path: Path,
        metas: Sequence[tuple[tuple[int, ...], torch.dtype] | None],
        has_own_tensors: bool,
    ) -> None:
        self.has_own_tensors = has_own_tensors
        self.metas = tuple(metas)
        for meta in metas:
            _described(caller, meta)
        handle, count = ctypes.c_void_p(), ctypes.c_size_t()
        try:
            library = ctypes.CDLL(str(path))
            create = library.AOTInductorModelContainerCreateWithDevice
            count_outputs = library.AOTInductorModelContainerGetNumOutputs
            run = library.AOTInductorModelContainerRunSingleThreaded
            count_inputs = library.AOTInductorModelContainerGetNumInputs
        except (OSError, AttributeError) as error:
            raise CompiledCodeError(f"{path}: {error}") from error
        self._library = library
        if create(ctypes.byref(handle), ctypes.c_size_t(1), b"cpu", None):
            raise CompiledCodeError(f"{path}: {self.last_error()}")
        self.container = handle.value
        self.run_address = ctypes.cast(run, ctypes.c_void_p).value
        count_inputs(handle, ctypes.byref(count))
        if count.value != len(metas):
            raise CompiledCodeError(f"{path}: takes {count.value} tensors, not {len(metas)}")
        count_outputs(handle, ctypes.byref(count))
        if count.value > MAX_WRITES:
            raise CompiledCodeError(f"{path}: gives {count.value} tensors, not {MAX_WRITES}")
        self.num_outputs = count.value

    def last_error(self) -> str:
        """Why the last call in this thread failed, as far as this torch's code reports it."""
        words = self._last_words()
        if words is None:
            return "compiled code failed, see standard error"
        return (words or b"no reason given").decode(errors="replace")

    @property
    def has_failed(self) -> bool:
        """Whether the last call in this thread failed, as far as this torch's code reports it."""
        return bool(self._last_words())

    def _last_words(self) -> bytes | None:
        try:
            function: Any = self._library.AOTInductorGetLastError
        except AttributeError:
            return None
        function.restype = ctypes.c_char_p
        words: bytes = function() or b""
        return words


class Bound:
    """A compiled function with its weights, which it keeps alive.

    One thread at a time may call it.
    """

    def __init__(self, caller: Caller, code: CompiledCode, address: int) -> None:
        self.address = address
        self._caller = caller
        self._code = code
        self._count = code.num_outputs
        self._results = ctypes.c_void_p * code.num_outputs
        self._data = struct.Struct(f"@{sum(meta is not None for meta in code.metas)}P").pack
        weakref.finalize(self, caller.unbind, address).atexit = False

    def __call__(self, *tokens: Tensor) -> list[Tensor]:
        """Call it; token arguments must be contiguous and have the declared dtypes.

        Raises
        ------
        CompiledCodeError
            The code failed.
        """
        results = self._results()
        data = self._data(*[tensor.data_ptr() for tensor in tokens])
        status = self._caller.call(self.address, len(tokens[0]), data, results)
        if status:
            self.fail(status)
        return stolen(results)

    @property
    def has_failed(self) -> bool:
        """Whether this thread's last call of its code failed, as far as that is reported."""
        return self._code.has_failed

    def fail(self, status: int) -> None:
        """Raise the error that a status of the library stands for."""
        if status == COMPILED_FAILED:
            raise CompiledCodeError(self._code.last_error())
        raise CompiledCodeError(f"the kernel library refused a call ({status})")


_new_capsule: Any = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
_capsule_name: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_capsule_pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def stolen(handles: Any) -> list[Tensor]:
    """The tensors behind an array of handles; takes ownership of the handles."""
    capsules = [_new_capsule(handle, None, None) for handle in handles]
    tensors: list[Tensor] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
    return tensors


def _handles(tensors: list[Tensor]) -> list[int]:
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
    return [_capsule_pointer(capsule, _capsule_name(capsule)) for capsule in capsules]


def _described(caller: Caller, meta: tuple[tuple[int, ...], torch.dtype] | None) -> BoundInput:
    """An input without its handle.

    Raises
    ------
    CompiledCodeError
        Kernels cannot make a token argument of this shape or dtype.
    """
    sizes = (ctypes.c_int64 * MAX_DIMS)()
    if meta is None:
        return BoundInput(handle=0, dtype=0, dims=0, sizes=sizes)
    shape, dtype = meta
    if not 1 <= len(shape) <= MAX_DIMS or dtype not in caller.dtype_codes:
        raise CompiledCodeError(f"arguments of shape {shape} and {dtype} cannot count tokens")
    sizes[:] = [*shape, *(1,) * (MAX_DIMS - len(shape))]
    return BoundInput(handle=0, dtype=caller.dtype_codes[dtype], dims=len(shape), sizes=sizes)
