"""The numbers by which kernels know the values of a matrix, for C++: from `src.ops.matrix.NUMBERS`.

Run `python -m src.ops.runtime.weight_kinds` after a change of the table.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from src.ops.matrix import KINDS, STRIP, Tiling

HEADER: Final = Path(__file__).with_name("weight_kinds.h")

_NAMES: Final = {"e4m3": "Float8", "e2m1": "E2M1", "bfloat16": "BFloat16"}
# Float types in rows, which are kinds too.
_DTYPES: Final = ("float32", "bfloat16", "float16")


def header() -> str:
    """The text of `weight_kinds.h`."""
    lines = []
    for kind, (number, tiling) in sorted(KINDS.items()):
        if tiling is Tiling.ROWS and number.name in _DTYPES:
            continue
        name = _NAMES.get(number.name, number.name.capitalize())
        lines.append(f"  k{name}{'Strips' * (tiling is Tiling.TILES)} = {kind},\n")
    return (
        "// Written by `python -m src.ops.runtime.weight_kinds` from `NUMBERS` of "
        "src/ops/matrix.py.\n"
        "#pragma once\n#include <cstdint>\n\n"
        "// Values of a matrix, beside the float types of DType. Quantized weights in strips\n"
        "// (integer_linear.h) are multiplied by rounded inputs.\n"
        f"enum WeightKind : int64_t {{\n{''.join(lines)}}};\n"
        f"constexpr int kStripOutputs = {STRIP};\n"
    )


if __name__ == "__main__":
    HEADER.write_text(header())
    sys.stdout.write(f"{HEADER}\n")
