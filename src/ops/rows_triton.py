# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Which row of a batch an element belongs to, for kernels whose programs take elements."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(starts, rows, position):
    """The last row that begins at or before a position."""
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) <= position:
            low = middle
        else:
            high = middle
    return low
