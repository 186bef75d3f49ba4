"""How a layer attends, as the C++ side has it."""

from __future__ import annotations

import struct

from src.ops.attention_spec import AttentionSpec

_ATTENTION_SPEC = struct.Struct("@2fqP")  # AttentionSpec in abi.h


def packed_spec(spec: AttentionSpec) -> bytes:
    """The C++ side's AttentionSpec; whoever keeps it keeps the sinks, too.

    Raises
        ValueError: Sinks that are not contiguous in host memory.
    """
    sinks, address = spec.sinks, 0
    if sinks is not None:
        if not (sinks.is_cpu and sinks.is_contiguous()):
            raise ValueError("expected contiguous sinks in host memory")
        address = sinks.data_ptr()
    return _ATTENTION_SPEC.pack(spec.scale, spec.cap or 0.0, spec.window or 0, address)
