"""The C entry points by which compiled code calls kernels: written from the ops' schemas.

Code that AOTInductor generates calls a C function for each op that is declared to it, with torch's
tensors, or, if it was rewritten for them (`src/compile/own_tensors.py`), with the kernel library's.
Both functions, the declaration, and the struct that carries the arguments to `compiled.cpp` follow
from an op's schema. Run `python -m src.ops.cpu.entries` after a change of one.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any, Final

import torch

from src.ops.adapt import ADAPT
from src.ops.declaration import Op
from src.ops.experts import EXPERTS
from src.ops.linear import LINEAR

CALLED: Final[tuple[Op[..., Any], ...]] = (LINEAR, EXPERTS, ADAPT)
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
    struct = "".join(part.capitalize() for part in op.name.split("_")) + "Given"
    names = ", ".join(name for _, name in _fields(op, "T"))
    fields = "".join(f"  {declared} {name};\n" for declared, name in _fields(op, "T"))
    entries = "".join(
        _wrapped(
            f"SLIPSTREAM_EXPORT int32_t {prefix}{entry_name(op)}({_parameters(op, tensor)}, "
            f"{tensor}* result) {{"
        )
        + _wrapped(f"  return compute({struct}<{tensor}>{{{names}}}, result);")
        + "}\n"
        for prefix, tensor in (("aoti_torch_", "Handle"), ("slipstream_", "Tensor*"))
    )
    return (
        f"// Arguments of `{op.name}`. T: Tensor*, or torch's Handle.\n"
        f"template <class T>\nstruct {struct} {{\n{fields}}};\n"
        f"template <class T>\nint32_t compute(const {struct}<T>& given, T* result);\n{entries}"
    )


def _wrapped(statement: str) -> str:
    return textwrap.fill(statement, 100, subsequent_indent="    ", break_long_words=False) + "\n"


def header() -> str:
    """The text of `compiled_entries.h`."""
    return (
        "// Written by `python -m src.ops.cpu.entries` from the ops' schemas.\n"
        "// Included by compiled.cpp alone.\n"
        "#pragma once\n\n" + "\n".join(map(_in_cpp, CALLED))
    )


if __name__ == "__main__":
    HEADER.write_text(header())
    sys.stdout.write(f"{HEADER}\n")
