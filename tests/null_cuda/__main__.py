"""Builds the library, and runs pytest in a process that has it from the beginning."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from src.core.settings import CHECKOUT
from tests.null_cuda.build import build

TESTS = ("tests/null_cuda/of_itself.py", "tests/null_cuda/of_engines.py")


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
        names_files = any(argument.startswith("tests") for argument in sys.argv[1:])
        files = () if names_files else TESTS
        command = [sys.executable, "-m", "pytest", *sys.argv[1:], *files]
        return subprocess.run(command, cwd=CHECKOUT, env=variables).returncode


if __name__ == "__main__":
    sys.exit(main())
