"""Instruction sets that the CPU kernels are built for, each a library of its own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Level:
    """An instruction set.

    Attributes
    ----------
    number
        As in self_check.cpp.
    needs, flags
        Required CPU features; compiler flags.
    pairs_in_strips
        Whether bfloat16 weights are multiplied fastest in strips.
    multiplies_bytes
        Whether integer products are the fastest, so that quantized weights are worth rounding
        their inputs.
    """

    name: str
    number: int
    needs: frozenset[str]
    flags: tuple[str, ...]
    pairs_in_strips: bool = False
    multiplies_bytes: bool = False


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_FLAGS = (*("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"), *_AVX2_FLAGS)
_AVX512_VNNI = _AVX512 | {"avx512_vnni"}
_AVX512_VNNI_FLAGS = (*_AVX512_FLAGS, "-mavx512vnni")
# Products of bfloat16 pairs and of four bytes; no CPU has only the former.
_PRODUCTS = _AVX512_VNNI | {"avx512_bf16"}
_PRODUCTS_FLAGS = (*_AVX512_VNNI_FLAGS, "-mavx512bf16")
_TILES = _PRODUCTS | {"amx_tile", "amx_bf16", "amx_int8"}

LEVELS = (
    Level("portable", 0, frozenset(), ()),
    Level("avx2", 1, _AVX2, _AVX2_FLAGS, pairs_in_strips=True, multiplies_bytes=True),
    Level(
        *("avx2_vnni", 2, _AVX2 | {"avx_vnni"}, (*_AVX2_FLAGS, "-mavxvnni")),
        pairs_in_strips=True,
        multiplies_bytes=True,
    ),
    Level("avx512", 3, _AVX512, _AVX512_FLAGS),
    Level("avx512_vnni", 4, _AVX512_VNNI, _AVX512_VNNI_FLAGS, multiplies_bytes=True),
    Level(
        *("avx512_bf16", 5, _PRODUCTS, _PRODUCTS_FLAGS),
        pairs_in_strips=True,
        multiplies_bytes=True,
    ),
    # Tiles multiply bfloat16 for any number of tokens, and quantized weights for many.
    Level(
        *("amx", 6, _TILES, (*_PRODUCTS_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
        pairs_in_strips=True,
        multiplies_bytes=True,
    ),
)
"""From slowest to fastest."""


def cpu_flags() -> frozenset[str]:
    """CPU features that the kernel reports in /proc/cpuinfo; empty if there are none."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


_MODEL: Final = (
    *("vendor_id", "cpu family", "model", "model name", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)
"""What names a processor in /proc/cpuinfo, of x86 and of ARM."""


def cpu_model() -> str:
    """Names the model of the first CPU; empty if the kernel does not.

    Two CPUs may have the same features, but unlike speeds.
    """
    found = []
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in _MODEL:
                found.append(f"{name.strip()}: {value.strip()}")
            elif not line.strip() and found:
                break
    return ", ".join(found)


def fastest_level(flags: frozenset[str]) -> Level:
    """The fastest level that a CPU with these flags supports."""
    return [level for level in LEVELS if level.needs <= flags][-1]
