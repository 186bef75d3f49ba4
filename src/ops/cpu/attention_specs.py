"""AttentionSpec values in the memory layout of the C++ side."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from src.ops.attention_spec import AttentionSpec
from src.ops.cpu import abi


def packed_specs(specs: Sequence[AttentionSpec]) -> ctypes.Array[abi.AttentionSpec]:
    """An array of the C++ side's AttentionSpec, in order, of at least one element.

    Keep it, and the specs with their sinks, as long as it is used.

    Raises
        ValueError: Sinks are not contiguous in host memory.
    """
    packed = (abi.AttentionSpec * max(1, len(specs)))()
    for index, spec in enumerate(specs):
        sinks = spec.sinks
        if sinks is not None and not (sinks.is_cpu and sinks.is_contiguous()):
            raise ValueError("expected contiguous sinks in host memory")
        packed[index] = abi.AttentionSpec(
            scale=spec.scale,
            cap=spec.cap or 0.0,
            window=spec.window or 0,
            chunk=spec.chunk or 0,
            sinks=0 if sinks is None else sinks.data_ptr(),
        )
    return packed
