"""The C entry points by which compiled code calls kernels: written from the ops' records.

Code that AOTInductor generates calls a C function for each op that is declared to it, with torch's
tensors, or, if it was rewritten for them (`src/compile/replace_torch_shims.py`), with the kernel
library's. Both functions, the declaration, and how the arguments become the struct of the kernel
follow from an op's record. Run `python -m src.ops.runtime.compiled_entries` after a change of one.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from src.ops.declaration import Op
from src.ops.projections.experts import EXPERTS
from src.ops.projections.linear import LINEAR
from src.ops.projections.lora import LORA
from src.ops.projections.matrix_field import MatrixField
from src.ops.records import Record as Call
from src.ops.records import TensorField
from src.ops.runtime import abi
from src.ops.runtime.c_records import Record
from src.ops.runtime.sizes import Sizes
from src.ops.runtime.struct_fields import StructField, matrices_of, tensors_of

CALLED: Final[tuple[Op[..., Any], ...]] = (LINEAR, EXPERTS, LORA)
"""Ops that compiled code calls without torch's dispatcher. Each returns one new tensor."""

HEADER: Final = Path(__file__).with_name("compiled_entries.h")

_SCALARS: Final = {"int": "int64_t", "float": "double", "bool": "int32_t"}


def entry_name(op: Op[..., Any]) -> str:
    """The part of the entry points' names that follows `aoti_torch_` and `slipstream_`."""
    return f"cpu_{op.name}"


def c_shim(op: Op[..., Any]) -> str:
    """The declaration that AOTInductor asks for."""
    parameters = _parameters(op, "AtenTensorHandle")
    return f"int32_t aoti_torch_{entry_name(op)}({parameters}, AtenTensorHandle* ret)"


def _fields(op: Op[..., Any], tensor: str) -> list[tuple[str, str]]:
    """(C type, name) of each argument; an absent optional tensor is a null pointer to one."""
    found = []
    for argument in op.overload._schema.arguments:
        kind = argument.type
        if isinstance(kind, torch.OptionalType):
            assert isinstance(kind.getElementType(), torch.TensorType), argument
            declared = f"{tensor}*"
        elif isinstance(kind, torch.TensorType):
            declared = tensor
        else:
            declared = _SCALARS[str(kind)]
        found.append((declared, argument.name))
    return found


def _parameters(op: Op[..., Any], tensor: str) -> str:
    return ", ".join(f"{declared} {name}" for declared, name in _fields(op, tensor))


def _in_cpp(op: Op[..., Any]) -> str:
    kernel = next(each for each in abi.KERNELS if each.call is op.record)
    lines = list(body(op.record, kernel))
    # The kernel is not told every argument.
    told = set(re.findall(r"\w+", " ".join(lines)))
    parameters = ", ".join(
        f"{declared} {name}" if name in told else declared for declared, name in _fields(op, "T")
    )
    names = ", ".join(name for _, name in _fields(op, "T"))
    entries = "".join(
        _opened(
            f"SLIPSTREAM_EXPORT int32_t {prefix}{entry_name(op)}({_parameters(op, tensor)}, "
            f"{tensor}* result)"
        )
        + _wrapped(f"  return call_{op.name}<{tensor}>({names}, result);")
        + "}\n"
        for prefix, tensor in (("aoti_torch_", "Handle"), ("slipstream_", "Tensor*"))
    )
    return (
        f"// `{op.name}`. T: Tensor*, or torch's Handle.\n"
        "template <class T>\n"
        + _opened(f"int32_t call_{op.name}({parameters}, T* result)")
        + "".join(f"  {line}\n" for line in lines)
        + f"}}\n{entries}"
    )


def body(call: type[Call], kernel: type[Record]) -> Iterator[str]:
    """From the arguments to the kernel's struct, its call and its result."""
    made = call.result
    assert made is not None
    tensors, matrices, sizes = tensors_of(call), matrices_of(call), Sizes(call)
    for name in call.flat_parameters():
        if name in matrices:
            yield f"const Seen values_of_{name}({name});"
            matrix = matrices[name]
            given = f"values_of_{name}, {matrix.scales}, {matrix.kind}"
            yield f"const SeenMatrix seen_{name}({given});"
        elif name in tensors and not tensors[name].is_optional:
            yield f"const Seen seen_{name}({name});"
    for (name, index), variable in sizes.read.items():
        yield f"const int64_t {_size(variable)} = seen_{name}.sizes[{index}];"
    for name, text in sizes.named.items():
        if name != text:
            yield f"const int64_t {_size(name)} = {_in_sizes(text)};"
    main = next(name for name, each in tensors.items() if each.dtype is None)
    yield f"{kernel.__name__} args{{}};"
    for field_name, field in kernel.declared.items():
        value = _value(field_name, field, tensors, matrices, main)
        if value:
            yield f"args.{field_name} = {value};"
    shape = ", ".join(_in_sizes(dim) for dim in made.dims)
    yield f"const int64_t shape[] = {{{shape}}};"
    yield f"return run_into_new(args, slipstream_{kernel.kernel}, shape,"
    yield f"                    seen_{made.like}.torch_dtype, result);"


def _value(
    name: str,
    field: StructField,
    tensors: Mapping[str, TensorField],
    matrices: Mapping[str, MatrixField],
    main: str,
) -> str:
    """A field of the struct; empty for the result's address, which is set later."""
    match field.source:
        case "address":
            if field.of in matrices:
                return f"values_of_{field.of}.data"
            is_there = field.of in tensors and not tensors[field.of].is_optional
            address = f"seen_{field.of}.data" if is_there else f"address_of({field.of})"
            is_typed = field.declared.removeprefix("const ") != "void*"
            return f"static_cast<{field.declared}>({address})" if is_typed else address
        case "result":
            return ""
        case "size":
            return _size(field.of)
        case "stride":
            return f"seen_{field.of}.strides[0]"
        case "number":
            return field.of
        case "group" | "group_dtype":
            return f"seen_{field.of}.{field.source}"
        case "dtype":
            return f"seen_{main}.dtype()"
        case "threads":
            return "slipstream_threads"
        case None:
            raise LookupError(f"compiled code says nothing of {name}")


def _size(name: str) -> str:
    """The variable with a size; arguments may have the name itself."""
    return f"size_{name}"


def _in_sizes(text: str) -> str:
    """An expression of sizes in C++."""
    return re.sub(r"[a-z_]\w*", lambda name: _size(name[0]), text).replace("//", "/")


def _opened(signature: str) -> str:
    return f"{_wrapped(signature).rstrip()} {{\n"


def _wrapped(statement: str) -> str:
    return textwrap.fill(statement, 100, subsequent_indent="    ", break_long_words=False) + "\n"


def header() -> str:
    """The text of `compiled_entries.h`."""
    return (
        "// Written by `python -m src.ops.runtime.compiled_entries` from the ops' records.\n"
        "// Included by compiled.cpp alone.\n"
        '#pragma once\n#include "runtime/seen.h"\n\n' + "\n".join(map(_in_cpp, CALLED))
    )


if __name__ == "__main__":
    HEADER.write_text(header())
    sys.stdout.write(f"{HEADER}\n")
