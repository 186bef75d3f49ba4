"""Builds the library, and runs pytest in a process that has it from the beginning.

    python -m tests.null_cuda --module benchmarks.mixed_steps --repeats 3

runs another module there, with the arguments that follow its name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from src.core.settings import CHECKOUT
from tests.null_cuda.build import build

TESTS = (
    "tests/null_cuda/of_itself.py",
    "tests/null_cuda/of_drafts.py",
    "tests/null_cuda/of_engines.py",
)


def _first(value: str, name: str) -> str:
    return ":".join((value, *filter(None, [os.environ.get(name)])))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="slipstream-null-cuda-") as folder:
        library = build(Path(folder))
        paths = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": folder}
        variables = {
            **os.environ,
            **{name: _first(value, name) for name, value in paths.items()},
            "TRITON_LIBCUDA_PATH": folder,
        }
        command = [sys.executable, "-m", *_module(sys.argv[1:])]
        return subprocess.run(command, cwd=CHECKOUT, env=variables).returncode


def _module(arguments: list[str]) -> list[str]:
    """What runs: a module that is named, or pytest."""
    if arguments[:1] == ["--module"]:
        return arguments[1:]
    names_files = any(argument.startswith("tests") for argument in arguments)
    return ["pytest", *arguments, *(() if names_files else TESTS)]


if __name__ == "__main__":
    sys.exit(main())
