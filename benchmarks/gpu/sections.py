"""Runs each section in a separate process, so that a crash or a hang ends only that section.

A section starts if enough time for it is left (its duration on one H200), and is killed after twice
that time. Its results until then count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.gpu import drafts, graphs, kernels, model, start, vectors
from benchmarks.gpu.session import Session
from benchmarks.gpu.table import Row
from src.core.settings import CHECKOUT

# Expected seconds with small inputs, on a busy CPU.
_QUICK_SECONDS = 60.0
# Seconds for a process to end when asked to.
_GRACE = 3.0


@dataclass(frozen=True)
class Section:
    """A section: the names of all its ``figures``, and its expected duration in ``seconds``."""

    name: str
    seconds: float
    figures: Callable[[argparse.Namespace], list[str]]
    run: Callable[[Session], None]

    def expected(self, options: argparse.Namespace) -> float:
        """Expected duration in seconds."""
        return _QUICK_SECONDS if options.quick else self.seconds


# In order of importance: the figures that others wait for come first, so that they are measured
# however little time there is.
SECTIONS: Final = {
    section.name: section
    for section in (
        Section("model", 180, model.figures, model.run),
        Section("kernels", 60, kernels.figures, kernels.run),
        Section("graphs", 60, graphs.figures, graphs.run),
        Section("drafts", 60, drafts.figures, drafts.run),
        Section("vectors", 60, vectors.figures, vectors.run),
        Section("start", 60, start.figures, start.run),
    )
}


def run_in_turn(
    options: argparse.Namespace, names: Sequence[str], arguments: Sequence[str]
) -> list[Row]:
    """Run these sections; returns all rows in the order of their figures.

    Parameters
    ----------
    arguments
        Of this command, for the sections' own processes.
    """
    deadline = time.monotonic() + options.budget_seconds
    rows: list[Row] = []
    told: list[Row]
    for name in names:
        section = SECTIONS[name]
        left, expected = deadline - time.monotonic(), section.expected(options)
        if left < expected:
            note = f"{name} takes {expected:.0f} s, {max(0.0, left):.0f} s were left"
            told = []
            missing = Row("", outcome="not run", note=note)
        else:
            print(f"\n== {name}", flush=True)
            told, end = _run_one(name, arguments, min(left, 2 * expected))
            missing = Row("", outcome="failed", note=f"the section {name} {end}")
        by_figure = {row.figure: row for row in told}
        rows += [
            by_figure.get(figure, msgspec.structs.replace(missing, figure=figure))
            for figure in section.figures(options)
        ]
    return rows


def _run_one(name: str, arguments: Sequence[str], seconds: float) -> tuple[list[Row], str]:
    """Run a section; returns its rows, and how its process ended."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        file = Path(folder) / "rows"
        file.touch()
        until = time.monotonic() + seconds
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.gpu", *arguments),
                *("--section", name, "--rows", str(file), "--until", str(until)),
            ],
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            # A session of its own, so that its children are killed with it.
            start_new_session=True,
        )
        try:
            end = f"ended with {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            end = f"took longer than {seconds:.0f} s"
        finally:
            _end(process)
        lines = file.read_bytes().split(b"\n")
    # The last piece is empty, or an incomplete line.
    return [msgspec.json.decode(line, type=Row) for line in lines[:-1]], end


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
