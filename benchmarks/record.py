"""Records figures with their context: one JSON line per measurement.

A figure is the median, minimum and maximum of several repeats. A line also has the commit, the
machine, the versions, the command and the resolved configuration.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from src.bench.environment import commit, machine, portable, versions
from src.core.config import Config

RESULTS = Path(__file__).parent / "results"


class Figure(msgspec.Struct, frozen=True):
    """Median, minimum and maximum of several repeats."""

    unit: str
    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, unit: str, values: Sequence[float]) -> Figure:
        return cls(unit, statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        span = f"  ({self.low:.4g} to {self.high:.4g})" if self.repeats > 1 else ""
        return f"{self.median:.4g} {self.unit}{span}"


def figures_of(units: Mapping[str, str], repeats: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """One figure per name in ``units``, from one mapping of values per repeat."""
    return {
        name: Figure.of(unit, [values[name] for values in repeats]) for name, unit in units.items()
    }


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value such that at least ``fraction`` of all are not above it (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(1000 * fraction) // 1000) - 1)]


class Recorder:
    """Prints a table and appends to ``benchmarks/results/<name>.jsonl``.

    Parameters
    ----------
    name
        Of the benchmark, and of its result file.
    save
        ``False`` to print only.
    command
        The command that repeats it; by default that of the module with this name.
    prints
        ``False`` if the figures are shown elsewhere.
    """

    def __init__(
        self, name: str, *, save: bool = True, command: str | None = None, prints: bool = True
    ) -> None:
        self._file = RESULTS / f"{name}.jsonl"
        self._save = save
        self._prints = prints
        self._about = {
            "benchmark": name,
            "commit": commit(),
            "command": command or f"python -m benchmarks.{name} {shlex.join(sys.argv[1:])}".strip(),
            "machine": machine(),
            "versions": versions(),
        }

    def add(
        self,
        measure: str,
        figures: Mapping[str, Figure],
        *,
        config: Config | None = None,
        **details: Any,
    ) -> None:
        """Add a measurement: ``details`` describe it, ``config`` is the engine's configuration."""
        if self._prints:
            print(f"\n{measure}")
            for name, figure in figures.items():
                print(f"  {name:<34}{figure}")
        line = {
            **self._about,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "measure": measure,
            "figures": msgspec.to_builtins(figures),
            "config": None if config is None else portable(msgspec.to_builtins(config)),
            **details,
        }
        if self._save:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a") as stream:
                stream.write(json.dumps(line) + "\n")


def add_common(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Add the options of every benchmark."""
    parser.add_argument(
        "--repeats", type=int, default=repeats, metavar="N", help="of each measurement"
    )
    parser.add_argument("--no-save", action="store_true", help="print only")
