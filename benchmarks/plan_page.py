"""Writes the examples of docs/plan.md.

    python -m benchmarks.plan_page           # writes docs/plan.md
    python -m benchmarks.plan_page --check   # reports whether that would change it

Each example is what `python -m src plan` prints for a shape of `benchmarks/shapes.py` on a device
of its table, so no machine is measured. It stands between two markers that name its arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.shapes import write_checkpoint
from src.cli.main import main as run_cli
from src.core.settings import CHECKOUT

PAGE: Final = CHECKOUT / "docs" / "plan.md"
SHAPE: Final = "8b"
NAME: Final = "Llama-3.1-8B"
_EXAMPLE: Final = re.compile(r"(```text\n\$ python -m src (plan [^\n]*)\n).*?(```)", re.DOTALL)


def written(page: str) -> str:
    """The page with fresh examples."""
    with _model():
        return _EXAMPLE.sub(lambda found: f"{found[1]}{_output(found[2])}{found[3]}", page)


def _output(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_cli(command.split())
    # Settings make paths absolute.
    return printed.getvalue().replace(f"{Path.cwd()}/", "")


@contextlib.contextmanager
def _model() -> Iterator[None]:
    """The working directory is one that has the model."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory) / NAME, SHAPE)
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would change")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    fresh = written(page)
    if arguments.check:
        return int(fresh != page)
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
