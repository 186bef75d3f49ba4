"""Rewrites compiled code to run its loops on the kernel library's threads instead of OpenMP's.

Inductor writes its loops over tokens for OpenMP. An OpenMP team would spin on the CPUs of the
kernels' threads and of the event loop, and would be started even for a loop of a microsecond. So
the kernel library implements the functions that such a loop calls (`src/ops/runtime/loops.cpp`),
under names of the same length. Overwriting OpenMP's names in a library makes it call them.

There, any number of threads may run the parts of a loop, even a single one, so no part may wait for
another. OpenMP's loops end with a barrier, which matters if something follows in the same parallel
region. Hence each loop gets a region of its own, and its barrier does nothing.
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
    # The number of threads, and whether they are worthwhile, is decided when the loop runs.
    "cpp.dynamic_threads": True,
    # More than one, so that loops are written for threads. The value has no other effect.
    "cpp.threads": 2,
}
"""Options of Inductor for code that can be rewritten."""


def prepare() -> bool:
    """Make this process's Inductor end each parallel region before the next loop.

    Returns whether the code of this platform's compiler can be rewritten.
    """
    from torch._inductor import cpp_builder
    from torch._inductor.codegen import cpp

    shared: Any = getattr(cpp, "WorkSharing", None)
    # Other compilers call other runtime functions for OpenMP.
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


def with_library_threads(library: bytes, source: str) -> bytes | None:
    """Rewrite a shared library of compiled code to run its loops on the kernel library's threads.

    Returns None if the library uses any other function of OpenMP; if a parallel region is not
    exactly one loop; or if names in its file format may not end in a zero byte (only ELF is known
    to be safe). Code without such loops is returned unchanged.

    Parameters
    ----------
    source
        The generated code from which the library was compiled.
    """
    names, pragmas = set(_NAME.findall(library)), _PRAGMA.findall(source)
    if not library.startswith(_ELF) or not names <= _OURS.keys():
        return None
    if pragmas != ["parallel", "for"] * (len(pragmas) // 2) or bool(pragmas) != bool(names):
        return None
    return _NAME.sub(lambda name: _OURS[name[0]], library)
