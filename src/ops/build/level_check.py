"""Checks in a separate process whether a level's library computes what the portable one does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from src.ops.build.compilers import compilers, was_killed
from src.ops.runtime.abi import KERNELS
from src.ops.runtime.c_records import Record

_TIMEOUT: Final = 180.0  # seconds; on a busy machine it takes one of them

PASSED: Final = "passed"
KILLED: Final = "killed, or took too long"
"""The machine was short of memory or time; this is no verdict on the level."""

# Runs in a bare interpreter: argv = portable library, level's library, level's number, kernels.
_CHECK: Final = """
import ctypes, sys
portable = ctypes.CDLL(sys.argv[1])
if not portable.slipstream_cpu_claims(int(sys.argv[3])):
    sys.exit("the CPU does not claim it")
level = ctypes.CDLL(sys.argv[2])
for library in (portable, level):
    # Small pieces of work are cut as well.
    library.slipstream_assume_wake_cost(ctypes.c_double(0.1))
for name in sys.argv[4:]:
    function = ctypes.cast(getattr(level, "slipstream_" + name), ctypes.c_void_p)
    status = portable.slipstream_self_check(name.encode(), function)
    if status == 4:  # kNoCheck
        sys.exit(f"the self-check has no check of {name}")
    if status:
        sys.exit(f"results of {name} differ from the portable level")
"""


def check(
    portable: Path, library: Path, number: int, kernels: Sequence[type[Record]] = KERNELS
) -> str:
    """Run a level's self-check: `PASSED`, `KILLED`, or what went wrong.

    A kernel without a check is a failure, so that no level serves with one that nobody compared.

    Raises
    ------
    BuildError
        This process is ending.
    """
    command = [sys.executable, "-I", "-S", "-c", _CHECK, str(portable), str(library), str(number)]
    process = compilers.start([*command, *(each.kernel for each in kernels)])
    errors = compilers.wait(process, _TIMEOUT)
    if process.returncode == 0:
        return PASSED
    if was_killed(process, errors):
        return KILLED
    return errors.strip().rpartition("\n")[2] or f"exit code {process.returncode}"
