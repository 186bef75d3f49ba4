"""Compiled code whose loops the kernel library's threads run, not a team of OpenMP's.

Inductor writes its loops over tokens for OpenMP. A team of it would spin on the CPUs on which the
kernels' threads and the event loop run, and would be assembled for a loop of a microsecond too. So
the kernel library serves what such a loop calls (`src/ops/cpu/loops.cpp`), under names of the same
length, and code calls those once they are written over OpenMP's.

There a part is run by whoever comes, and all of them by one thread if need be, so none may wait for
another. OpenMP's loops do where they end, which matters when something follows in the same parallel
region. Hence each loop has a region of its own, and its barrier is nothing.
"""

from __future__ import annotations

import re
from typing import Any, Final

_ELF: Final = b"\x7fELF"
_NAME: Final = re.compile(rb"(?<=\0)(?:GOMP_|omp_|__kmpc_)\w+(?=\0)")
_PRAGMA: Final = re.compile(r"#pragma omp (?!simd)(\w+)")
_OURS: Final = {
    b"GOMP_barrier": b"slipstream_0",
    b"GOMP_parallel": b"slipstream_do",
    b"omp_get_thread_num": b"slipstream_my_part",
    b"omp_get_num_threads": b"slipstream_in_parts",
}

OPTIONS: Final = {
    # How many, and whether it is worth their while, is known when the loop runs.
    "cpp.dynamic_threads": True,
    # More than one: loops are written for threads. Beyond that it is no number of anything.
    "cpp.threads": 2,
}
"""Inductor's, for code that can be rewritten."""


def prepare() -> bool:
    """Have this process's Inductor end a parallel region where the next loop begins.

    Returns whether this platform's compiler may make code that can be rewritten.
    """
    from torch._inductor import cpp_builder
    from torch._inductor.codegen import cpp

    shared: Any = getattr(cpp, "WorkSharing", None)
    # Other compilers have functions of their own beneath OpenMP.
    if shared is None or not cpp_builder.is_gcc():
        return False
    if not getattr(shared, "is_alone", False):
        cpp.WorkSharing = _alone(shared)  # type: ignore[misc]
    return True


def _alone(shared: Any) -> Any:
    class Alone(shared):
        is_alone = True

        def parallel(self, threads: int) -> None:
            self.close()
            super().parallel(threads)

    return Alone


def with_own_threads(library: bytes, source: str) -> bytes | None:
    """A shared library of compiled code, rewritten to have its loops run by the kernel library.

    None if it calls anything else of OpenMP's; if a parallel region is not one loop; or if the
    library is in a format of which not every name ends in a zero byte (only ELF is known to). Code
    without such loops is returned as it is.

    Parameters
    ----------
    source
        The code that the library was made of.
    """
    names, pragmas = set(_NAME.findall(library)), _PRAGMA.findall(source)
    if not library.startswith(_ELF) or not names <= _OURS.keys():
        return None
    if pragmas != ["parallel", "for"] * (len(pragmas) // 2) or bool(pragmas) != bool(names):
        return None
    return _NAME.sub(lambda name: _OURS[name[0]], library)
