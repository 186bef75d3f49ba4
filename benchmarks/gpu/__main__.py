"""The complete acceptance test of a GPU in one command, in less than nine minutes on one H200::

    python -m benchmarks.gpu                                      # Llama 3.1 8B, dummy weights
    python -m benchmarks.gpu --only kernels model                 # only some sections
    python -m benchmarks.gpu --device cpu --shape tiny --quick    # test of the benchmark itself

Times come first: per token, prefill, an offline batch, device idle time, kernels per layer. Then
ops and captured steps are checked against references, and cold and warm starts are timed. A table
with goals and limits is printed last; one JSON line per measurement goes to results/gpu.jsonl.
SIGTERM ends the section that runs, too.

Exit code: 0 if every goal was met, 3 if one was missed, 1 if a measurable figure is missing, 2
without a device or without the tools that Triton needs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from benchmarks.gpu.sections import SECTIONS, run_in_turn
from benchmarks.gpu.session import Session
from benchmarks.gpu.table import Row, exit_code, facts_of, lines_of
from benchmarks.record import Figure, Recorder, add_common
from benchmarks.shapes import SHAPES
from src.bench.environment import commit, machine, versions


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and graphs")
    parser.add_argument("--quick", action="store_true", help="small inputs: figures mean nothing")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", default=None)
    parser.add_argument("--budget-seconds", type=float, default=500.0, metavar="S")
    add_common(parser, repeats=3)
    # Argument of a section's own process.
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def command_of(options: argparse.Namespace, arguments: list[str]) -> str:
    """The command that repeats the measurement; in a section's process, that of the whole run."""
    shown = arguments[: arguments.index("--section")] if options.section else arguments
    return f"python -m benchmarks.gpu {shlex.join(shown)}".strip()


def missing_tools() -> list[str]:
    """Tools that Triton needs on this machine to launch a kernel, and that are missing.

    Triton compiles a launcher in C for every signature.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return ["a C compiler (gcc, clang or CC)"]
    # The interpreter's own headers; Debian's default scheme names a directory without headers.
    headers = sysconfig.get_path("include", "posix_prefix")
    checks = [compiler, "-fsyntax-only", f"-I{headers}", "-xc", "-"]
    try:
        subprocess.run(checks, input=b"#include <Python.h>\n", check=True, capture_output=True)
    except OSError:
        return [f"a C compiler other than {compiler}, which cannot be run"]
    except subprocess.CalledProcessError:
        return [f"Python.h, which {compiler} does not find in {headers}"]
    return []


def show(rows: list[Row], seconds: float) -> None:
    """Print the machine, and the table."""
    here, packages = machine(), versions()
    print(f"\n{here['cpus']} CPUs of {here['cpu']}, {here['memory_gib']} GiB, at {commit()}")
    print(", ".join(f"{name} {version}" for name, version in packages.items()))
    print(f"{seconds:.0f} s\n")
    print("\n".join(lines_of(rows)), flush=True)


def _end_on_sigterm(number: int, frame: object) -> None:
    # As an exception: a section's process is a session of its own, and is ended on the way out.
    sys.exit(128 + number)


def main() -> int:
    arguments = sys.argv[1:]
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return 2
    missing = missing_tools() if options.device == "cuda" else []
    if missing:
        print(f"benchmarks.gpu: Triton needs {' and '.join(missing)}", file=sys.stderr)
        return 2
    recorder = Recorder(
        "gpu",
        save=not options.no_save,
        command=command_of(options, arguments),
        prints=bool(options.section),
    )
    if options.section:
        SECTIONS[options.section].run(Session(options, recorder, options.rows, options.until))
        return 0
    signal.signal(signal.SIGTERM, _end_on_sigterm)
    begun = time.monotonic()
    rows = run_in_turn(options, options.only or list(SECTIONS), arguments)
    seconds = time.monotonic() - begun
    table = [facts_of(row) for row in rows]
    recorder.add(
        "acceptance", {"time": Figure.of("s", [seconds])}, shape=options.shape, table=table
    )
    show(rows, seconds)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
