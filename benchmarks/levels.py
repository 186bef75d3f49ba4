"""Projections by instruction set level: no level should be slower than one below it.

    python -m benchmarks.levels

Compiles the projections for every level that this CPU has, and times each format at 1, 4, 16, 64
and 256 rows on one thread, all levels in turns. Weights are laid out as a model's are at that
level. Times are CPU time, so other processes matter little. Levels measure their ways first, as a
build does. A cell in which a lower level wins is marked with its name.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.record import Figure, Recorder, add_common
from src.ops.build import ways
from src.ops.build.cache_root import cache_root
from src.ops.build.cpp_compiler import cpp_compiler
from src.ops.build.levels import LEVELS, Level, cpu_flags
from src.ops.build.objects import Objects
from src.ops.build.timed_calls import timed_calls
from src.ops.build.units import LINK_FLAGS, Unit, units_of
from src.ops.projections.linear import LINEAR
from src.ops.runtime.abi import LinearArgs
from src.ops.runtime.calls import use_threads
from src.ops.runtime.packing import bind
from src.ops.runtime.way_calls import LibraryWays

ROWS: Final = (1, 4, 16, 64, 256)
FORMATS: Final = (
    "same",
    "int8",
    "int8/32",
    "int4/32",
    "int4/32 with bfloat16 offsets",
    "int4/128",
)
_NAMES: Final = {"same": "bfloat16", "int4/32 with bfloat16 offsets": "int4/32 offsets"}
_UNITS: Final = frozenset({"linear.cpp", "pool.cpp"})
_SHAPE: Final = {"inputs": 1024, "outputs": 2816, "dtype": torch.bfloat16}
_WINS: Final = 0.95
"""A lower level wins if it takes at most this part of the time."""
_SECONDS: Final = 0.02  # of a cell, a turn and a level, at most

Linear = Callable[..., torch.Tensor]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.levels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--levels", nargs="+", choices=[level.name for level in LEVELS])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    add_common(parser, repeats=5)
    return parser.parse_args()


def projections(levels: list[Level]) -> dict[str, ctypes.CDLL]:
    """A library of each level with nothing but projections, compiled as they are shipped."""
    compiler = cpp_compiler()
    if compiler is None:
        sys.exit("there is no C++ compiler")
    wanted: dict[str, list[Unit]] = {
        level.name: [unit for unit in units_of(level) if unit.source.name in _UNITS]
        for level in levels
    }
    libraries = {}
    with tempfile.TemporaryDirectory() as folder:
        kept = Objects(cache_root() / "level-projections", compiler, "")
        objects, failed = kept.make(wanted, Path(folder), seconds=600)
        for name, reason in failed.items():
            print(f"{name}: {reason}")
        for name, files in objects.items():
            output = str(Path(folder) / f"{name}.so")
            command = [*compiler[0], *LINK_FLAGS, *map(str, files), "-o", output]
            subprocess.run(command, check=True)
            libraries[name] = ctypes.CDLL(output)
    return libraries


def arguments(level: Level, rows: int, weight: str) -> tuple[Any, ...]:
    """Arguments of the op as a model has them at this level."""
    strips = level.pairs_in_strips if weight == "same" else level.multiplies_bytes
    built: tuple[Any, ...] = LINEAR.build(
        "cpu", tokens=rows, weight=f"{'strips of ' if strips else ''}{weight}", **_SHAPE
    )
    return built


def best_time(linear: Linear, call: tuple[Any, ...]) -> float:
    """The shortest of some calls, in microseconds of this thread."""
    best, until = float("inf"), time.perf_counter() + _SECONDS
    while True:
        begin = time.thread_time_ns()
        linear(*call)
        best = min(best, (time.thread_time_ns() - begin) / 1e3)
        if time.perf_counter() > until:
            return best


def marked(times: dict[str, float]) -> list[str]:
    """Times of levels, slowest level first; with the name of the best lower level where it wins."""
    cells, before = [], ("", float("inf"))
    for name, spent in times.items():
        wins = before[1] <= _WINS * spent
        cells.append(f"{spent:.1f}" + (f" < {before[0]}" if wins else ""))
        before = min(before, (name, spent), key=lambda each: each[1])
    return cells


def main() -> int:
    options = parse()
    recorder = Recorder("levels", save=not options.no_save, prints=False)
    use_threads(1)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    chosen = options.levels or [level.name for level in LEVELS]
    levels = [level for level in LEVELS if level.needs <= cpu_flags() and level.name in chosen]
    libraries = projections(levels)
    levels = [level for level in levels if level.name in libraries]
    linears = {
        name: bind(library.slipstream_linear, LinearArgs) for name, library in libraries.items()
    }
    for level in levels:
        found = LibraryWays(libraries[level.name])
        ways.apply(found, ways.measure(found, timed_calls(linears[level.name])))
        for line in ways.told(found):
            print(f"{level.name}: {line}")
    print("linear", _SHAPE, "microseconds")
    print(" | ".join(["format", "rows", *(level.name for level in levels)]))
    won = 0
    for weight in options.formats:
        for rows in options.rows:
            calls = {level.name: arguments(level, rows, weight) for level in levels}
            turns: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(options.repeats):
                for name, call in calls.items():
                    turns[name].append(best_time(linears[name], call))
            cells = marked({name: min(each) for name, each in turns.items()})
            won += "<" in cells[-1]
            print(" | ".join([_NAMES.get(weight, weight), str(rows), *cells]), flush=True)
            figures = {name: Figure.of("us", each) for name, each in turns.items()}
            recorder.add(f"linear {_NAMES.get(weight, weight)}", figures, rows=rows)
    print(f"cells in which a level below the fastest wins: {won}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
