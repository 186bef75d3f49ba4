"""Calls of the kernels, written from an op's record and from the struct that follows from it.

What the op's record says of its tensors is checked at each call. Where each field of the struct
comes from says `struct_fields`. The text of the function is made once, as that of a dataclass's
`__init__` is: a call takes some microseconds.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from src.ops.declaration import BACKEND
from src.ops.records import ANY, Record, TensorField
from src.ops.runtime import c_records as records
from src.ops.runtime.calls import DTYPES, kernel_threads, raise_status
from src.ops.runtime.matrix_reading import reader_of
from src.ops.runtime.sizes import Sizes, in_parentheses
from src.ops.runtime.struct_fields import StructField, matrices_of, tensors_of


def bind(
    function: Any,
    struct: type[records.Record],
    *,
    computed: Mapping[str, Callable[..., Any]] | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """The op as a function of its flat arguments.

    Parameters
    ----------
    function
        A library's, which takes the struct by pointer, or one of Python, which takes the struct
        itself. It returns a `Status`.
    struct
        The kernel's, of an op's record.
    computed
        Field that the op's record does not say -> function of it; its parameters are names of flat
        arguments. A struct that it returns is passed by its address, and lives as long as the call.
    check
        A function of flat arguments, too, that raises what the op's record cannot say. What that
        says is true of them.

    Raises
    ------
    LookupError
        A field of the struct comes from nowhere.
    """
    call = struct.call
    if call is None:
        raise LookupError(f"{struct.__name__} is of no op")
    if not inspect.isfunction(function):
        # One of a library: it is given the struct's address.
        function.argtypes = (ctypes.POINTER(struct),)
    source = _Source(call, struct, computed or {}, check)
    text = "\n".join(source.lines())
    scope = source.scope | {
        "function": function,
        "struct": struct,
        "address_of": ctypes.addressof,
        "DTYPES": DTYPES,
        "empty": torch.empty,
        "threads": kernel_threads,
        "raise_status": raise_status,
        "lies_packed": _lies_packed,
        "refusal": lambda *given: _refusal(call, given),
    }
    source.require_own_names(scope)
    exec(text, scope)
    made: Callable[..., Any] = scope[call.__name__]
    return made


class _Source:
    """The text of one function. Dimensions are local variables, by their names."""

    def __init__(
        self,
        call: type[Record],
        struct: type[records.Record],
        computed: Mapping[str, Callable[..., Any]],
        check: Callable[..., None] | None,
    ) -> None:
        self._call, self._struct = call, struct
        self._computed, self._check = computed, check
        self._tensors, self._matrices = tensors_of(call), matrices_of(call)
        self._sizes = Sizes(call)
        self.scope: dict[str, Any] = {f"compute_{name}": each for name, each in computed.items()}
        self.scope |= {"check": check}
        self.scope |= {
            f"read_{name}": reader_of(len(each.dims)) for name, each in self._matrices.items()
        }
        # The tensor whose dtype is that of others.
        own = (name for name, each in self._tensors.items() if each.dtype is None)
        self._main = next(own, None)

    def lines(self) -> Iterator[str]:
        """Of the function."""
        optional = self._call.optional_flat()
        parameters = [
            f"{name}={self._call.fields[name].default!r}" if name in optional else name
            for name in self._call.flat_parameters()
            if name != BACKEND
        ]
        yield f"def {self._call.__name__}({', '.join(parameters)}):"
        given = ", ".join([*self._call.tensors(), *self._matrices])
        for name, matrix in self._matrices.items():
            read = [self._sizes.variable(name, at) for at in range(len(matrix.dims))]
            read += [_group_of(name), _group_dtype_of(name)]
            parts = ", ".join((name, matrix.kind, matrix.scales, matrix.offsets))
            yield f"    {', '.join(read)} = read_{name}({parts})"
        yield "    try:"
        for name in filter(self._sizes.is_read, self._tensors):
            read = [self._sizes.variable(name, at) for at in range(len(self._tensors[name].dims))]
            yield f"        {', '.join(read)}, = {name}.shape"
        yield "    except ValueError:"
        yield f"        raise refusal({given}) from None"
        for name, value in self._sizes.named.items():
            if name != value:
                yield f"    {name} = {value}"
        if self._main is not None:
            yield f"    main = {self._main}.dtype"
            yield "    dtype = DTYPES.get(main)"
        yield f"    if not ({' and '.join(self._conditions())}):"
        yield f"        raise refusal({given})"
        if self._check is not None:
            # Behind the shapes, which it may rely on.
            yield f"    check({_arguments(self._check)})"
        made = self._call.result
        if made is not None:
            sizes = "".join(f"{in_parentheses(dim)}, " for dim in made.dims)
            self.scope["result_dtype"] = made.dtype
            dtype = f"{made.like}.dtype" if made.dtype is None else "result_dtype"
            # Sizes one by one, and strides all at once, are what torch is quick at.
            yield f"    {made.name} = empty({sizes}dtype={dtype})"
        fields = {name: self._value(name, each) for name, each in self._struct.declared.items()}
        for name in self._computed:
            if self._struct.declared[name].ctype is ctypes.c_void_p:
                yield f"    of_{name} = {fields[name]}"
                fields[name] = f"address_of(of_{name})"
        yield f"    status = function(struct({', '.join(fields.values())}))"
        yield "    if status:"
        yield "        raise_status(status)"
        yield f"    return {None if made is None else made.name}"

    def require_own_names(self, scope: Collection[str]) -> None:
        """Refuse a dimension with the name of something else in the function."""
        taken = {*scope, *self._call.flat_parameters(), "main", "dtype", "status"}
        taken |= set() if self._call.result is None else {self._call.result.name}
        for dim in self._sizes.named:
            if dim in taken:
                raise LookupError(f"{self._call.__name__} cannot have a dimension {dim!r}")

    def _conditions(self) -> Iterator[str]:
        if self._main is not None:
            yield "dtype is not None"
        for name, each in self._tensors.items():
            wanted = list(self._of_tensor(name, each))
            whole = " and ".join(wanted)
            yield f"({name} is None or ({whole}))" if each.is_optional else whole
        for name, matrix in self._matrices.items():
            yield f"({matrix.scales} is not None or {name}.dtype == main)"
            yield from self._of_sizes(name, matrix.dims)

    def _of_tensor(self, name: str, each: TensorField) -> Iterator[str]:
        yield from self._of_sizes(name, each.dims)
        if each.dtype is None and name != self._main:
            yield f"{name}.dtype == main"
        elif isinstance(each.dtype, torch.dtype):
            self.scope[f"dtype_of_{name}"] = each.dtype
            yield f"{name}.dtype == dtype_of_{name}"
        if not each.rows:
            yield f"{name}.is_contiguous()"
        elif len(each.dims) == 2:
            yield f"({name}.stride()[1] == 1 or {in_parentheses(each.dims[1])} <= 1)"
        else:
            behind = [in_parentheses(dim) for dim in each.dims[1:]]
            strides = "".join(f"{'*'.join(behind[at:])}, " for at in range(1, len(behind)))
            yield f"({name}.stride()[1:] == ({strides}1) or lies_packed({name}))"

    def _of_sizes(self, name: str, dims: tuple[str, ...]) -> Iterator[str]:
        is_read = self._sizes.is_read(name)
        if not is_read and "_" not in dims:
            yield f"{name}.shape == ({''.join(f'{in_parentheses(dim)}, ' for dim in dims)})"
            return
        if not is_read:
            yield f"{name}.dim() == {len(dims)}"
        for index, dim in enumerate(dims):
            if dim != "_" and not self._sizes.is_settled(name, index):
                size = self._sizes.variable(name, index) if is_read else f"{name}.shape[{index}]"
                yield f"{size} == {in_parentheses(dim)}"

    def _value(self, name: str, field: StructField) -> str:
        """What is put into a field of the struct."""
        if name in self._computed:
            return f"compute_{name}({_arguments(self._computed[name])})"
        match field.source:
            case "address":
                tensor = self._tensors.get(field.of)
                # Which parts a matrix has depends on its encoding.
                is_there = tensor is not None and not tensor.is_optional
                address = f"{field.of}.data_ptr()"
                if is_there or field.of in self._matrices:
                    return address
                return f"(0 if {field.of} is None else {address})"
            case "result":
                assert self._call.result is not None
                return f"{self._call.result.name}.data_ptr()"
            case "size" | "number":
                return field.of
            case "stride":
                return f"{field.of}.stride()[0]"
            case "group":
                return _group_of(field.of)
            case "group_dtype":
                return _group_dtype_of(field.of)
            case "dtype":
                return "dtype"
            case "threads":
                return "threads()"
            case None:
                raise LookupError(
                    f"{self._struct.__name__}.{name} is nothing of {self._call.__name__}"
                )


def _group_of(matrix: str) -> str:
    """The variable with a matrix's group."""
    return f"group_of_{matrix}"


def _group_dtype_of(matrix: str) -> str:
    return f"group_dtype_of_{matrix}"


def _arguments(function: Callable[..., Any]) -> str:
    return ", ".join(inspect.signature(function).parameters)


def _lies_packed(tensor: Tensor) -> bool:
    """Whether the dimensions behind the first are contiguous; one of size 1 or 0 always is."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _refusal(call: type[Record], given: tuple[Tensor | None, ...]) -> ValueError:
    """Says what was expected, and what came."""
    expected, got = [], []
    tensors, matrices = call.tensors(), matrices_of(call)
    for (name, each), tensor in zip(tensors.items(), given, strict=False):
        if not each.on_cpu:
            continue
        dtype = "" if each.dtype is None or each.dtype == ANY else f" {each.dtype}"
        expected.append(
            f"{name} {_shape(each.dims)}{dtype}{' with free rows' if each.rows else ''}"
        )
        if tensor is None:
            got.append(f"{name} None")
        else:
            got.append(f"{name} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}")
    for (name, matrix), values in zip(matrices.items(), given[len(tensors) :], strict=True):
        expected.append(f"{name} {_shape(matrix.dims)}, in that dtype if without scales")
        got.append(f"{name} {'' if values is None else f'{tuple(values.shape)} {values.dtype}'}")
    return ValueError(
        "expected contiguous tensors, and of one dtype where none is said: "
        f"{', '.join(expected)}; got {', '.join(got)}"
    )


def _shape(dims: tuple[str, ...]) -> str:
    return f"[{', '.join('any' if dim == '_' else dim for dim in dims)}]"
