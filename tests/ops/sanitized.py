"""Runs the op tests on kernels that sanitizers watch; exits non-zero for what they find.

    python -m tests.ops.sanitized
    python -m tests.ops.sanitized tests/ops/projections/test_linear.py -k few

Addresses and undefined behaviour: the levels are compiled with both, into a cache of their own, and
tests run on them. Threads: a program of its own (`threads_under_tsan.cpp`) has the pool, and
every kernel on it, do what an engine has them do, for what Python and torch do would be looked at
too.

No kernel is left out. Each has a self-check, or its level does not pass; both sanitizers run
that. And the tests are all of this folder, but for those that `APART` names.
"""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from src.ops.build.units import SOURCES, UNITS
from src.ops.runtime.abi import KERNELS

ROOT = Path(__file__).parents[2]
# These call no kernels that sanitizers could watch: they are of Triton, of libraries of others, of
# emulated instructions, of compilers, and of this folder's tools.
APART = frozenset(
    f"test_{name}.py"
    for name in (
        *("amx", "linear_amx", "libraries", "decode_schedule", "routing"),
        *("freeze", "kernels", "launching", "objects", "prebuilt", "triton"),
    )
)
# Kernels that are no op's: masks and grammar steps, all of a step in one call, sockets.
ELSEWHERE = (
    *("tests/engine/grammar/test_masks.py", "tests/engine/grammar/test_grammar_steps.py"),
    *("tests/engine/execution/test_step_computer.py", "tests/http/hypercorn/test_outbox.py"),
)
TESTS = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "tests" / "ops").rglob("test_*.py"))
    if path.name not in APART
] + [*ELSEWHERE]
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
    """The pool by itself, under attention for long, and under every kernel's self-check."""
    program = folder / "threads"
    compiler = (os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-g1", "-fsanitize=thread")
    flags = ("-pthread", "-Wno-psabi", f"-I{SOURCES}")

    def compiled(source: Path) -> str:
        output = folder / f"{source.stem}.o"
        command = [*compiler, *flags, "-c", str(source), "-o", str(output)]
        subprocess.run(command, check=True)
        return str(output)

    sources = [ROOT / "tests" / "ops" / "threads_under_tsan.cpp"]
    sources += [SOURCES / unit for unit in UNITS]
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        objects = list(pool.map(compiled, sources))
    # Kernels are found by their names.
    link = [*compiler, *flags, "-rdynamic", *objects, "-ldl", "-o", str(program)]
    subprocess.run(link, check=True)
    # Its runtime wants memory where a randomised layout may have put something else.
    fixed = ["setarch", platform.machine(), "-R", str(program)]
    fixed += [str(kernel.kernel) for kernel in KERNELS]
    options = {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"}
    return subprocess.run(fixed, env={**os.environ, **options}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
