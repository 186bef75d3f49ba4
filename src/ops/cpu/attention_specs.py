"""AttentionSpec values in the memory layout of the C++ side."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from src.ops.attention_spec import AttentionSpec

_ATTENTION_SPEC = struct.Struct("@2f2qP")  # AttentionSpec in abi.h


def packed_specs(specs: Sequence[AttentionSpec]) -> ctypes.Array[ctypes.c_char]:
    """An array of the C++ side's AttentionSpec. Keep it as long as it is used; it keeps the sinks.

    Raises
        ValueError: Sinks are not contiguous in host memory.
    """
    packed = ctypes.create_string_buffer(max(1, len(specs)) * _ATTENTION_SPEC.size)
    for index, spec in enumerate(specs):
        address = 0
        if spec.sinks is not None:
            if not (spec.sinks.is_cpu and spec.sinks.is_contiguous()):
                raise ValueError("expected contiguous sinks in host memory")
            address = spec.sinks.data_ptr()
        _ATTENTION_SPEC.pack_into(
            *(packed, index * _ATTENTION_SPEC.size, spec.scale),
            *(spec.cap or 0.0, spec.window or 0, spec.chunk or 0, address),
        )
    return packed
