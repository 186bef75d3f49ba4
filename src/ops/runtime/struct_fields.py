"""The fields of a kernel's struct that follow from an op's record, and where each comes from.

A kernel is given an address for each tensor, each named size, the free strides, each number, and
the dtype of the tensors and the number of threads. Of a matrix it is given the address of each
part, its kind, its group, and the dtype of its groups' scales.
"""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from src.ops.projections.matrix_field import MatrixField
from src.ops.records import REQUIRED, NestedField, NumberField, Record, TensorField

Source = Literal[
    "address", "result", "size", "stride", "number", "group", "group_dtype", "dtype", "threads"
]
"""What a field is of a call; `group` and `group_dtype` are those of a matrix."""

_POINTEES: Final = {torch.float32: "float", torch.int64: "int64_t", torch.int32: "int32_t"}
_NUMBERS: Final = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_double}
_PARTS: Final = {"int": int, "bool": bool, "float": float}


@dataclass(frozen=True)
class StructField:
    """One field: its type in Python and in C++, its length if it is an array, and its meaning.

    Attributes
    ----------
    source
        What it is of an op's call; None: a record of an op does not say it.
    of
        The tensor, dimension, number or matrix that it is of.
    default
        What it is in C++ unless it is set, as in Python where an argument is left out.
    """

    ctype: type
    declared: str
    meaning: str
    length: str = ""
    source: Source | None = None
    of: str = ""
    default: str = ""

    def line(self, name: str) -> str:
        """The declaration in C++."""
        length = self.length and f"[{self.length}]"
        return f"  {self.declared} {name}{length}{self.default and f' = {self.default}'};"


def matrices_of(call: type[Record]) -> dict[str, MatrixField]:
    """The matrices of a record, by the name of their values' flat argument."""
    found = (each.by for each in call.fields.values() if isinstance(each, NestedField))
    return {each.name: each for each in found if isinstance(each, MatrixField)}


def tensors_of(call: type[Record]) -> dict[str, TensorField]:
    """The flat tensors that a kernel of the CPU takes, those of matrices without values and scales.

    Which values and scales there may be depends on the matrix's encoding.
    """
    found = {
        name: each
        for name, each in call.fields.items()
        if isinstance(each, TensorField) and each.on_cpu
    }
    for matrix in matrices_of(call).values():
        if matrix.order is not None:
            *stacked, _, inputs = matrix.dims
            found[matrix.order] = TensorField(
                (*stacked, inputs), torch.int32, False, False, True, None, is_optional=True
            )
    return found


def names_in(dim: str) -> list[str]:
    """The named sizes in an expression of them."""
    nodes = ast.walk(ast.parse(dim, mode="eval"))
    return sorted({node.id for node in nodes if isinstance(node, ast.Name)} - {"_"})


def fields_of(call: type[Record], names: Mapping[str, str]) -> dict[str, StructField]:
    """The fields of the struct.

    Parameters
    ----------
    names
        Field -> what it is called in the op's record, where these differ: a tensor, a size, or a
        tensor with `_stride` behind it.
    """
    renamed = {of: name for name, of in names.items()}
    made = dict(_fields_of(call))
    if unknown := renamed.keys() - made.keys():
        raise LookupError(f"{call.__name__} has no {sorted(unknown)}")
    return {renamed.get(name, name): field for name, field in made.items()}


def _fields_of(call: type[Record]) -> Iterator[tuple[str, StructField]]:
    yield from _addresses(call)
    sizes: dict[str, None] = {}
    for dim in _dims(call):
        sizes |= dict.fromkeys(names_in(dim))
    for name in sizes:
        yield name, _int64("size", name)
    for name, tensor in tensors_of(call).items():
        if tensor.rows:
            yield f"{name}_stride", _int64("stride", name)
    for field_name, each in call.fields.items():
        if isinstance(each, NumberField) and each.on_cpu:
            yield field_name, _number(field_name, each.kind, each.default)
        elif isinstance(each, NestedField):
            has_default = each.default is not REQUIRED
            defaults = each.by.parts(each.default) if has_default else itertools.repeat(REQUIRED)
            for (part, kind), default in zip(each.by.PARTS, defaults, strict=False):
                if kind in _PARTS:
                    yield part, _number(part, _PARTS[kind], default)
            if isinstance(each.by, MatrixField):
                yield each.by.group, _int64("group", each.by.name, "inputs; 0: a row's")
                meaning = "of scales and offsets of groups: kFloat32, kBFloat16 or kPowers"
                yield each.by.group_dtype, _int64("group_dtype", each.by.name, meaning)
    if any(each.dtype is None for each in tensors_of(call).values()):
        yield "dtype", _int64("dtype")
    yield "threads", _int64("threads")


def _addresses(call: type[Record]) -> Iterator[tuple[str, StructField]]:
    tensors, matrices = tensors_of(call), matrices_of(call)
    for name in call.flat_parameters():
        if name in tensors:
            yield name, _address(name, tensors[name])
        if name in matrices:
            for part, meaning in _meanings(matrices[name]).items():
                yield part, _pointer("const void*", meaning, part)
    made = call.result
    if made is not None:
        pointee = (
            _POINTEES.get(made.dtype, "void") if isinstance(made.dtype, torch.dtype) else "void"
        )
        shape = f"{_shape(made.dims)} contiguous"
        yield made.name, dataclasses.replace(_pointer(f"{pointee}*", shape), source="result")


def _dims(call: type[Record]) -> Iterator[str]:
    tensors, matrices = tensors_of(call), matrices_of(call)
    for name in call.flat_parameters():
        if name in tensors:
            yield from tensors[name].dims
        if name in matrices:
            yield from matrices[name].dims


def _meanings(matrix: MatrixField) -> dict[str, str]:
    """Meanings of the parts of a matrix whose dtypes depend on its encoding."""
    *stacked, outputs, inputs = matrix.dims
    stack, rows, columns = "".join(f"{each}, " for each in stacked), outputs, inputs
    return {
        matrix.name: (
            f"[{stack}{_spaced(rows)}, {_spaced(columns)}] contiguous; 4 bits: half as many "
            "columns. In strips of 64 outputs (the last one is padded): int8 [strips, inputs / 4, "
            "64, 4], int4 [strips, inputs / 8, 64, 4], bfloat16 [strips, inputs / 2, 64, 2]"
        ),
        matrix.scales: (
            f"int8 with group 0: [{stack}{_spaced(rows)}]; otherwise [{stack}{_spaced(rows)}, "
            "inputs / group], in strips [strips, inputs / group, 64]; or null"
        ),
        matrix.offsets: (
            "of groups, like the scales: a weight is level * scale - offset; null for zeros"
        ),
    }


def _address(name: str, tensor: TensorField) -> StructField:
    pointee = "void"
    if isinstance(tensor.dtype, torch.dtype):
        pointee = _POINTEES[tensor.dtype]
    meaning = _shape(tensor.dims)
    meaning += ", with a free stride of the first dimension" if tensor.rows else " contiguous"
    meaning += "; or null" if tensor.is_optional else ""
    return _pointer(f"{'' if tensor.changed else 'const '}{pointee}*", meaning, name)


def _shape(dims: tuple[str, ...]) -> str:
    return f"[{', '.join(map(_spaced, dims))}]"


def _spaced(dim: str) -> str:
    return "any" if dim == "_" else ast.unparse(ast.parse(dim, mode="eval"))


def _pointer(declared: str, meaning: str, of: str = "") -> StructField:
    return StructField(ctypes.c_void_p, declared, meaning, source="address", of=of)


def _int64(source: Source, of: str = "", meaning: str = "") -> StructField:
    return StructField(ctypes.c_int64, "int64_t", meaning, source=source, of=of)


def _number(name: str, kind: type, default: Any) -> StructField:
    ctype: Any = _NUMBERS[kind]
    declared = "double" if kind is float else "int64_t"
    whole = int if kind is bool else kind
    text = "" if default is REQUIRED else str(whole(default))
    return StructField(ctype, declared, "", source="number", of=name, default=text)
