"""The roofline plot of the ops: their performance relative to the machine's limits.

S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures" (CACM 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from src.bench.plots.canvas import COLOURS, NothingToDraw, new_figure, read_lines

_MARKERS: Final = ("o", "s", "^", "D", "v", "P")


class OpPoint(msgspec.Struct, frozen=True, rename={
    "bandwidth": "GB/s", "rate": "GFLOP/s",
    "machine_bandwidth": "machine GB/s", "machine_rate": "machine GFLOP/s",
}):  # fmt: skip
    """One case of one op: GB/s and GFLOP/s of the op and of the machine."""

    op: str
    case: str
    bandwidth: float
    rate: float
    machine_bandwidth: float
    machine_rate: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.rate / self.bandwidth


def read_points(paths: Sequence[Path]) -> list[OpPoint]:
    """The latest measurement of each case in files of ``nox -s bench``.

    Raises
    ------
    ConfigError
        A file cannot be read.
    NothingToDraw
        They contain no measurement of an op.
    """
    last: dict[tuple[str, str], OpPoint] = {}
    for path in paths:
        for document in read_lines(path):
            try:
                point = msgspec.convert(document, OpPoint)
            except msgspec.ValidationError:
                continue
            # An op without floating-point operations has no place in the plot.
            if point.bandwidth > 0 and point.rate > 0:
                last[point.op, point.case] = point
    if not last:
        raise NothingToDraw("no op was measured in these files: `nox -s bench` writes them")
    return list(last.values())


def draw(points: Sequence[OpPoint]) -> Any:
    """Plot operations per second against operations per byte, below the machine's roof."""
    figure = new_figure(8.0, 5.0)
    axes = figure.add_subplot()
    bandwidth = max(point.machine_bandwidth for point in points)
    rate = max(point.machine_rate for point in points)
    ridge = rate / bandwidth
    low = min(*(point.intensity for point in points), ridge) / 2
    high = max(*(point.intensity for point in points), ridge) * 2
    axes.plot(
        [low, ridge, high], [low * bandwidth, rate, rate], color="black", linewidth=1.2,
        label=f"{bandwidth:.1f} GB/s, {rate:.0f} GFLOP/s",
    )  # fmt: skip
    ops = list(dict.fromkeys(point.op for point in points))
    for point in points:
        place = ops.index(point.op)
        reached = point.rate / min(point.machine_rate, point.intensity * point.machine_bandwidth)
        axes.plot(
            [point.intensity], [point.rate], linestyle="none",
            marker=_MARKERS[place % len(_MARKERS)], color=COLOURS[place % len(COLOURS)],
        )  # fmt: skip
        axes.annotate(
            f"{point.case} ({100 * reached:.0f} %)", (point.intensity, point.rate),
            xytext=(4, 3), textcoords="offset points", fontsize=6,
        )  # fmt: skip
    for place, op in enumerate(ops):
        marker, colour = _MARKERS[place % len(_MARKERS)], COLOURS[place % len(COLOURS)]
        axes.plot([], [], linestyle="none", marker=marker, color=colour, label=op)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("Operations per byte")
    axes.set_ylabel("GFLOP/s")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize="small", loc="lower right")
    return figure
