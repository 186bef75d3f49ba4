"""Calls of the kernels, written from an op's record and from the record of its kernel's struct.

What the op's record says of its tensors is checked at each call. Each field of the struct has the
name of a tensor (its address), of a dimension, of a number, or of a tensor with `_stride` behind it
(elements between two of its first dimension). The text of the function is made once, as that of a
dataclass's `__init__` is: a call takes some microseconds.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from src.ops.cpu import records
from src.ops.cpu.calls import DTYPES, kernel_threads, raise_status
from src.ops.declaration import BACKEND
from src.ops.records import ANY, NumberField, Record, TensorField

_STRIDE: Final = "_stride"


def bind(
    function: Any,
    call: type[Record],
    struct: type[records.Record],
    *,
    names: Mapping[str, str] | None = None,
    computed: Mapping[str, Callable[..., Any]] | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """The op as a function of its flat arguments.

    Parameters
    ----------
    function
        A library's, which takes the struct by pointer, or one of Python, which takes the struct
        itself. It returns a `Status`.
    call, struct
        The records of the op and of the kernel.
    names
        Field of the struct -> what it is called in the op's record, where these differ.
    computed
        Field of the struct -> function of it; its parameters are names of flat arguments. A struct
        that it returns is passed by its address, and lives as long as the call.
    check
        A function of flat arguments, too, that raises what the op's record cannot say. What that
        says is true of them.

    Raises
    ------
    LookupError
        The records do not fit together.
    """
    if not inspect.isfunction(function):
        # One of a library: it is given the struct's address.
        function.argtypes = (ctypes.POINTER(struct),)
    source = _Source(call, struct, names or {}, computed or {}, check)
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
        names: Mapping[str, str],
        computed: Mapping[str, Callable[..., Any]],
        check: Callable[..., None] | None,
    ) -> None:
        self._call, self._struct, self._names = call, struct, names
        self._computed, self._check = computed, check
        self._tensors = {name: each for name, each in call.tensors().items() if each.on_cpu}
        self.scope: dict[str, Any] = {f"compute_{name}": each for name, each in computed.items()}
        self.scope |= {"check": check}
        self._dims: dict[str, str] = {}  # name -> how it is computed, in an order that serves
        self._read: dict[tuple[str, int], str] = {}  # (tensor, dimension) -> variable with its size
        self._settled: set[tuple[str, int]] = set()  # those that can contradict no other
        self._unpacked: list[str] = []
        # The tensor whose dtype is that of others.
        own = (name for name, each in self._tensors.items() if each.dtype is None)
        self._main = next(own, None)

    def lines(self) -> Iterator[str]:
        """Of the function."""
        self._find_dims()
        optional = self._call.optional_flat()
        parameters = [
            f"{name}={self._call.fields[name].default!r}" if name in optional else name
            for name in self._call.flat_parameters()
            if name != BACKEND
        ]
        yield f"def {self._call.__name__}({', '.join(parameters)}):"
        given = ", ".join(self._call.tensors())
        yield "    try:"
        for name in self._unpacked:
            read = (self._size_of(name, at) for at in range(len(self._tensors[name].dims)))
            yield f"        {', '.join(read)}, = {name}.shape"
        yield "    except ValueError:"
        yield f"        raise refusal({given}) from None"
        for name, value in self._dims.items():
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
            sizes = "".join(f"{_text(dim)}, " for dim in made.dims)
            self.scope["result_dtype"] = made.dtype
            dtype = f"{made.like}.dtype" if made.dtype is None else "result_dtype"
            # Sizes one by one, and strides all at once, are what torch is quick at.
            yield f"    {made.name} = empty({sizes}dtype={dtype})"
        fields = {name: self._value(name) for name in self._struct.declared}
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
        for dim in self._dims:
            if dim in taken:
                raise LookupError(f"{self._call.__name__} cannot have a dimension {dim!r}")

    def _find_dims(self) -> None:
        """Name each size that can be read off a shape, or follows from those known."""
        waiting = [
            (ast.parse(dim, mode="eval").body, name, index)
            for name, each in self._tensors.items()
            for index, dim in enumerate(each.dims)
            if not each.is_optional and dim != "_"
        ]
        # A size that stands alone is read, not computed.
        waiting.sort(key=lambda each: not isinstance(each[0], ast.Name))
        progress = True
        while progress:
            progress = False
            for expression, name, index in waiting:
                unknown = _names_in(expression) - self._dims.keys()
                if len(unknown) != 1:
                    continue
                dim, progress = unknown.pop(), True
                is_alone = isinstance(expression, ast.Name)
                size = dim if is_alone else f"{name}_{index}"
                self._dims[dim] = dim if is_alone else _solved(expression, size, dim)
                self._read[name, index] = size
                if not any(isinstance(each, ast.Mult) for each in ast.walk(expression)):
                    self._settled.add((name, index))
        self._unpacked = [name for name in self._tensors if any(name == of for of, _ in self._read)]

    def _size_of(self, name: str, index: int) -> str:
        """The variable that a size is read into."""
        return self._read.get((name, index), f"{name}_{index}")

    def _conditions(self) -> Iterator[str]:
        if self._main is not None:
            yield "dtype is not None"
        for name, each in self._tensors.items():
            wanted = list(self._of_tensor(name, each))
            whole = " and ".join(wanted)
            yield f"({name} is None or ({whole}))" if each.is_optional else whole

    def _of_tensor(self, name: str, each: TensorField) -> Iterator[str]:
        yield from self._of_sizes(name, each)
        if each.dtype is None and name != self._main:
            yield f"{name}.dtype == main"
        elif isinstance(each.dtype, torch.dtype):
            self.scope[f"dtype_of_{name}"] = each.dtype
            yield f"{name}.dtype == dtype_of_{name}"
        if not each.rows:
            yield f"{name}.is_contiguous()"
        elif len(each.dims) == 2:
            yield f"({name}.stride()[1] == 1 or {_text(each.dims[1])} <= 1)"
        else:
            behind = [_text(dim) for dim in each.dims[1:]]
            strides = "".join(f"{'*'.join(behind[at:])}, " for at in range(1, len(behind)))
            yield f"({name}.stride()[1:] == ({strides}1) or lies_packed({name}))"

    def _of_sizes(self, name: str, each: TensorField) -> Iterator[str]:
        if name not in self._unpacked and "_" not in each.dims:
            yield f"{name}.shape == ({''.join(f'{_text(dim)}, ' for dim in each.dims)})"
            return
        if name not in self._unpacked:
            yield f"{name}.dim() == {len(each.dims)}"
        for index, dim in enumerate(each.dims):
            if dim != "_" and (name, index) not in self._settled:
                is_read = name in self._unpacked
                size = self._size_of(name, index) if is_read else f"{name}.shape[{index}]"
                yield f"{size} == {_text(dim)}"

    def _value(self, field: str) -> str:
        """What is put into a field of the struct."""
        name = self._names.get(field, field)
        if field in self._computed:
            return f"compute_{field}({_arguments(self._computed[field])})"
        made = self._call.result
        if made is not None and name == made.name:
            return f"{name}.data_ptr()"
        if name in self._tensors:
            address = f"{name}.data_ptr()"
            is_optional = self._tensors[name].is_optional
            return f"(0 if {name} is None else {address})" if is_optional else address
        if name in self._dims:
            return name
        if name.removesuffix(_STRIDE) in self._tensors:
            return f"{name.removesuffix(_STRIDE)}.stride()[0]"
        if field == "dtype":
            return "dtype"
        if field == "threads":
            return "threads()"
        if isinstance(self._call.fields.get(name), NumberField):
            return name
        raise LookupError(f"{self._struct.__name__}.{field} is nothing of {self._call.__name__}")


def _arguments(function: Callable[..., Any]) -> str:
    return ", ".join(inspect.signature(function).parameters)


def _text(dim: str) -> str:
    return dim if dim.isidentifier() else f"({dim})"


def _names_in(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def _solved(expression: ast.expr, value: str, unknown: str) -> str:
    """What `unknown` is if the expression has this value."""
    while not isinstance(expression, ast.Name):
        if not isinstance(expression, ast.BinOp):
            raise LookupError(f"no size follows from {ast.unparse(expression)}")
        is_left = unknown in _names_in(expression.left)
        other = ast.unparse(expression.right if is_left else expression.left)
        if isinstance(expression.op, ast.Add):
            value = f"({value} - ({other}))"
        elif isinstance(expression.op, ast.Sub):
            value = f"({value} + ({other}))" if is_left else f"(({other}) - {value})"
        elif isinstance(expression.op, ast.Mult):
            value = f"({value} // ({other}))"
        else:
            raise LookupError(f"no size follows from {ast.unparse(expression)}")
        expression = expression.left if is_left else expression.right
    return value


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
    for (name, each), tensor in zip(call.tensors().items(), given, strict=True):
        if not each.on_cpu:
            continue
        dims = ", ".join("any" if dim == "_" else dim for dim in each.dims)
        dtype = "" if each.dtype is None or each.dtype == ANY else f" {each.dtype}"
        expected.append(f"{name} [{dims}]{dtype}{' with free rows' if each.rows else ''}")
        if tensor is None:
            got.append(f"{name} None")
        else:
            got.append(f"{name} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}")
    return ValueError(
        "expected contiguous tensors, and of one dtype where none is said: "
        f"{', '.join(expected)}; got {', '.join(got)}"
    )
