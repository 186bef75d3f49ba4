"""Instruction sets that the CPU kernels are built for, each a library of its own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    """An instruction set: `number` as in self_check.cpp, CPU flags it needs, compiler flags."""

    name: str
    number: int
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX512 = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"})
_AVX512_FLAGS = (
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    *("-mavx2", "-mfma", "-mf16c"),
)

# Of pairs of bfloat16, and of fours of bytes: no CPU has only the former.
_PRODUCTS = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_PRODUCTS_FLAGS = (*_AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni")

LEVELS = (
    Level("portable", 0, frozenset(), ()),
    Level("avx2", 1, frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c")),
    Level("avx512", 2, _AVX512, _AVX512_FLAGS),
    Level("avx512_bf16", 3, _PRODUCTS, _PRODUCTS_FLAGS),
    Level(
        "amx",
        4,
        _PRODUCTS | {"amx_tile", "amx_bf16"},
        (*_PRODUCTS_FLAGS, "-mamx-tile", "-mamx-bf16"),
    ),
)
"""From slowest to fastest."""


def cpu_flags() -> frozenset[str]:
    """Instruction sets that the kernel reports for this CPU; empty where it does not say."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def fastest_level(flags: frozenset[str]) -> str:
    """Name of the fastest level that a CPU with these flags can have."""
    return [level.name for level in LEVELS if level.needs <= flags][-1]


TAKES_STRIPS = frozenset({"avx2", "avx512_bf16"})
"""Levels that multiply fastest where weights lie in strips: tiles of AMX hold more, loops less."""
