"""The units of the CPU kernels: their names, their compiler flags, and what they are made of."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from src.ops.build.levels import Level

SOURCES: Final = Path(__file__).parents[1]

# Those that take longest come first: the last compiler to end should be one of a short unit.
UNITS: Final = (
    "projections/linear.cpp",
    "attention/paged_attention.cpp",
    "attention/latent_attention.cpp",
    "projections/experts.cpp",
    "build/self_check.cpp",
    "projections/rounding.cpp",
    "states/recurrence.cpp",
    "sampling/gumbel_argmax.cpp",
    "projections/lora.cpp",
    "runtime/step.cpp",
    "runtime/step_mixers.cpp",
    "runtime/compiled.cpp",
    "runtime/tensors.cpp",
    "runtime/pool.cpp",
    "runtime/loops.cpp",
    "sampling/token_masks.cpp",
    "runtime/sockets.cpp",
)
SAME_FOR_EVERY_LEVEL: Final = frozenset(
    {
        "runtime/compiled.cpp",
        "runtime/loops.cpp",
        "runtime/pool.cpp",
        "runtime/sockets.cpp",
        "runtime/step.cpp",
        "runtime/step_mixers.cpp",
        "runtime/tensors.cpp",
    }
)
"""Units that only call others or keep books. They are compiled once, without a level's flags.

Neither they nor their headers ask which instruction set they are compiled for.
"""
FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wextra",
    # The ABI of vectors does not matter: they are only passed between functions of one library.
    "-Wno-psabi",
    # GCC's own AVX-512 header leaves unused operands undefined, and warns about them at inlining.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
LINK_FLAGS: Final = ("-shared", "-pthread")

_INCLUDE: Final = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def further_flags() -> list[str]:
    """Further compiler flags from `SLIPSTREAM_KERNEL_FLAGS`, for tests and sanitizers.

    Tests add `-Werror`. Otherwise warnings are shown only if the compiler fails: a user's compiler
    may be newer than the tested ones and warn about correct code.
    """
    return shlex.split(os.environ.get("SLIPSTREAM_KERNEL_FLAGS", ""))


def digest(*parts: bytes) -> str:
    """A name for contents."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Unit:
    """A source file with the flags that it is compiled with.

    ``before`` is a header that is included ahead of everything else.
    """

    source: Path
    flags: tuple[str, ...]
    before: Path | None = None

    def command(self) -> list[str]:
        """Arguments of the compiler, all but the name of the object."""
        before = [] if self.before is None else ["-include", str(self.before)]
        return [*self.flags, f"-I{SOURCES}", *before, "-c", str(self.source)]

    def key(self, compiler: tuple[list[str], str], machine: str) -> str:
        """A digest of everything that the object depends on.

        Headers in angle brackets are the compiler's or the system's; its version stands for them.
        ``machine`` counts because a compiler may be told to look at the CPU that it runs on.
        """
        # `-Werror` does not change the objects that do compile.
        flags = [flag for flag in self.flags if flag != "-Werror"]
        parts = [repr((compiler, machine, flags)).encode()]
        for start in (self.before, self.source):
            for path in files_of(start) if start is not None else ():
                parts += [path.name.encode(), path.read_bytes()]
        return digest(*parts)


def units_of(level: Level, optimization: str | None = None) -> list[Unit]:
    """The units of a level's library, in the order in which they are best compiled.

    ``optimization`` replaces the compiler's flag for it, for libraries that serve nobody.
    """
    flags = tuple(f for f in FLAGS if optimization is None or not f.startswith("-O"))
    flags += () if optimization is None else (optimization,)
    further = tuple(further_flags())
    return [Unit(SOURCES / name, (*flags, *_level_flags(level, name), *further)) for name in UNITS]


def _level_flags(level: Level, name: str) -> tuple[str, ...]:
    return () if name in SAME_FOR_EVERY_LEVEL else level.flags


def files_of(source: Path) -> list[Path]:
    """A source file and what it includes in quotation marks, directly or not, in a fixed order."""
    found, waiting = {source}, [source]
    while waiting:
        path = waiting.pop()
        for name in _INCLUDE.findall(path.read_bytes()):
            # As the compiler looks for it: beside the file, then in the folder of the rooms.
            beside = path.parent / os.fsdecode(name)
            header = beside if beside.exists() else SOURCES / os.fsdecode(name)
            if header not in found and header.exists():
                found.add(header)
                waiting.append(header)
    return sorted(found)
