"""Runs the op tests on kernels that sanitizers watch; exits non-zero for what they find.

    python -m tests.ops.sanitized
    python -m tests.ops.sanitized tests/ops/projections/test_linear.py -k few

Addresses and undefined behaviour: the levels are compiled with both, into a cache of their own, and
the tests of the ops run on them. Threads: a program of its own (`threads_under_tsan.cpp`) has the
pool, and attention on it, do what an engine has them do, for what Python and torch do would be
looked at too.
"""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from src.ops.build.units import SOURCES

ROOT = Path(__file__).parents[2]
# What calls kernels: others of this folder are of Triton, of libraries, or of builds.
TESTS = [
    f"tests/ops/{name}.py"
    for name in (
        "test_declarations",
        *(f"attention/test_{name}" for name in ("paged_attention", "spec", "deterministic")),
        *(f"attention/test_{name}" for name in ("few_rows", "latent_attention")),
        *(f"projections/test_{name}" for name in ("linear", "integer_linear", "pair_strips")),
        *(f"projections/test_{name}" for name in ("rounding", "experts")),
        "states/test_recurrence",
        "sampling/test_gumbel_argmax",
    )
]
FLAGS = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    *("-g1", "-O1"),
)

# Each pass is several times slower than usual.
_BUILD = """
from src.ops.build import cache_root, kernel_cache, level_check
from tests.ops.conftest import OPTIMIZATION
kernel_cache._COMPILE_TIMEOUT = level_check._TIMEOUT = 3000.0
kernel_cache.KernelCache(cache_root.cache_root()).build_all(OPTIMIZATION)
"""


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="slipstream-sanitized-") as folder:
        status = threads(Path(folder))
        return status or memory(Path(folder), arguments)


def memory(folder: Path, arguments: Sequence[str]) -> int:
    """Addresses and undefined behaviour."""
    compiler = os.environ.get("CXX", "c++")
    find = [compiler, "-print-file-name=libasan.so"]
    runtime = subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
    environment = {
        **os.environ,
        "SLIPSTREAM_KERNEL_FLAGS": " ".join(FLAGS),
        "SLIPSTREAM_CACHE_DIR": os.environ.get("SLIPSTREAM_CACHE_DIR", str(folder / "cache")),
        "LD_PRELOAD": runtime,
        # Python and compilers free little of what they have at their end.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    for command in (
        [sys.executable, "-c", _BUILD],
        [
            *(sys.executable, "-m", "pytest", "-q", "--timeout=3000", "-m", "not gpu"),
            # What a sanitizer says at a process's end must not be kept by pytest.
            "--capture=sys",
            *(arguments or TESTS),
        ],
    ):
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if done.returncode:
            return done.returncode
    return 0


def threads(folder: Path) -> int:
    """The pool, by itself and under attention."""
    program = folder / "threads"
    units = [str(SOURCES / unit) for unit in ("attention/paged_attention.cpp", "runtime/pool.cpp")]
    subprocess.run(
        [
            *(os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-g1", "-fsanitize=thread"),
            *("-pthread", "-Wno-psabi", f"-I{SOURCES}"),
            *(str(ROOT / "tests" / "ops" / "threads_under_tsan.cpp"), *units, "-o", str(program)),
        ],
        check=True,
    )
    # Its runtime wants memory where a randomised layout may have put something else.
    fixed = ["setarch", platform.machine(), "-R", str(program)]
    options = {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"}
    return subprocess.run(fixed, env={**os.environ, **options}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
