"""Structs that pass between Python and the C++ kernels, each declared once.

A `Record` is a `ctypes.Structure` whose fields have names on both sides. From the same declarations
comes `abi_records.h`, which asserts every size and offset, and the number by which a library and
this package know that they were made for each other. Run `python -m src.ops.runtime.abi` after a
change of `abi.py`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import inspect
import textwrap
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from torch import Tensor

from src.ops.records import Record as Call
from src.ops.runtime.struct_fields import StructField, fields_of

_WIDTH = 100


def pointer(declared: str, meaning: str = "") -> Any:
    """A field with an address, `declared` as in C++; 0 is null.

    The owner of the memory must outlive the call: a record keeps nothing alive.
    """
    return StructField(ctypes.c_void_p, declared, meaning)


def int64(meaning: str = "") -> Any:
    """A field with an integer, a boolean, or a number of an enum."""
    return StructField(ctypes.c_int64, "int64_t", meaning)


def float64(meaning: str = "") -> Any:
    """A field with a double."""
    return StructField(ctypes.c_double, "double", meaning)


def float32(meaning: str = "") -> Any:
    """A field with a float."""
    return StructField(ctypes.c_float, "float", meaning)


def int64_array(constant: str, length: int, meaning: str = "") -> Any:
    """A field with `length` integers; `constant` is that number's name in C++."""
    return StructField(ctypes.c_int64 * length, "int64_t", meaning, constant)


class Record(ctypes.Structure):
    """A struct of named fields. Its constructor takes every field by name.

    Attributes
    ----------
    kernel
        The entry point that takes a pointer to the struct and returns a `Status`; empty if the
        struct is a part of others.
    call
        The op's record whose calls the kernel computes; None: no op has such a struct.
    declared
        Its fields by name.
    """

    kernel: ClassVar[str] = ""
    call: ClassVar[type[Call] | None] = None
    declared: ClassVar[dict[str, StructField]] = {}

    @property
    def address(self) -> int:
        """Where the struct lies in memory, for as long as this object lives."""
        return ctypes.addressof(self)

    @classmethod
    def of(cls, value: Any) -> Self:
        """The struct of a value, see `record`. Keep the value's tensors as long as it is used.

        Raises
        ------
        ValueError
            A tensor is not contiguous in host memory.
        """
        given = {}
        for name in cls.declared:
            each = getattr(value, name)
            if isinstance(each, Tensor):
                if not (each.is_cpu and each.is_contiguous()):
                    raise ValueError(f"expected contiguous {name} in host memory")
                each = each.data_ptr()
            given[name] = each or 0
        return cls(**given)

    @classmethod
    def in_cpp(cls) -> str:
        """The declaration in C++, with assertions that Python lays it out alike."""
        comment = inspect.cleandoc(cls.__doc__ or "").splitlines()
        lines = [f"// {line}".rstrip() for line in comment] + [f"struct {cls.__name__} {{"]
        for name, field in cls.declared.items():
            line = field.line(name)
            meaning = f"  // {field.meaning}" if field.meaning else ""
            if len(line + meaning) > _WIDTH:
                lines += [f"  // {part}" for part in textwrap.wrap(field.meaning, _WIDTH - 5)]
                meaning = ""
            lines.append(line + meaning)
        size = f"sizeof({cls.__name__}) == {ctypes.sizeof(cls)}"
        lines += ["};", f'static_assert({size}, "as in Python");']
        for name in cls.declared:
            place, struct = getattr(cls, name), cls.__name__
            same = f"offsetof({struct}, {name}) == {place.offset}"
            same += f" && sizeof({struct}::{name}) == {place.size}"
            lines.append(f'static_assert({same}, "as in Python");')
        return "\n".join(lines) + "\n"


_records: list[type[Record]] = []
_Class = TypeVar("_Class", bound=type[Record])


@dataclass_transform(
    kw_only_default=True, field_specifiers=(pointer, int64, float64, float32, int64_array)
)
def record(
    *,
    kernel: str = "",
    call: type[Call] | None = None,
    names: Mapping[str, str] | None = None,
    value: type | None = None,
) -> Callable[[_Class], _Class]:
    """Make a record of a class that declares fields: `tokens: int = int64("how many")`.

    Fields stand in the order of the C++ struct. Those that follow from `call`, an op's record, come
    first; see `struct_fields`. `names` says where they are called otherwise: field -> name there.
    `value` is a dataclass whose fields it has, see `Record.of`: a tensor of it is of float32.
    """

    def declare(cls: _Class) -> _Class:
        cls.kernel, cls.call = kernel, call
        own = {name: field for name, field in vars(cls).items() if isinstance(field, StructField)}
        if call is not None:
            own = fields_of(call, names or {}) | own
        if value is not None:
            own = _fields_of_value(value) | own
        cls.declared = own
        for name in own.keys() & vars(cls).keys():
            delattr(cls, name)
        cls._fields_ = [(name, field.ctype) for name, field in cls.declared.items()]
        _records.append(cls)
        return cls

    return declare


_OF_VALUES: dict[type, Callable[[], Any]] = {
    float: float32,
    int: int64,
    Tensor: lambda: pointer("const float*"),
}


def _fields_of_value(value: type) -> dict[str, StructField]:
    hints = typing.get_type_hints(value)
    made = {}
    for each in dataclasses.fields(value):
        kinds = typing.get_args(hints[each.name]) or (hints[each.name],)
        made[each.name] = _OF_VALUES[kinds[0]]()
    return made


def records() -> tuple[type[Record], ...]:
    """All records, in the order of their declaration."""
    return tuple(_records)


def digest(text: str) -> int:
    """A number below 2**31 that stands for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
