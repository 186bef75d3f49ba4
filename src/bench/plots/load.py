"""Plots latency against load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from src.bench.plots.canvas import COLOURS, NothingToDraw, new_figure, read_lines

_MS: Final = 1000.0
METRICS: Final = {
    "ttft": "Time to first token (ms)",
    "tpot": "Time per output token (ms)",
    "e2el": "End-to-end latency (ms)",
}


class Point(msgspec.Struct, frozen=True):
    """One run: its series, requests per second, and median and 99th percentile per metric.

    Attributes
    ----------
    offered, throughput
        Requests per second: arriving, if known, and answered.
    latencies
        In milliseconds; metrics that the run lacks are left out.
    """

    series: str
    offered: float
    throughput: float
    latencies: dict[str, tuple[float, float]]


def read_points(paths: Sequence[Path]) -> list[Point]:
    """Runs from files of ``bench serve`` (or vLLM's) and of ``bench simulate --output-json``.

    Raises
    ------
    ConfigError
        A file cannot be read.
    NothingToDraw
        No file contains a run.
    """
    points = [
        point
        for path in paths
        for document in read_lines(path)
        for point in _points(document, path.stem)
    ]
    if not points:
        raise NothingToDraw("no file is one of `bench serve` or `bench simulate --output-json`")
    return points


def _points(document: Any, name: str) -> Iterator[Point]:
    if isinstance(document, list):
        for row in document:
            if isinstance(row, dict) and {"changes", "outcome"} <= row.keys():
                yield _simulated(row["changes"], row["outcome"])
    elif isinstance(document, dict) and "request_throughput" in document:
        yield _served(document, name)


def _simulated(changes: dict[str, str], outcome: dict[str, Any]) -> Point:
    rates = ("request_rate", "found request_rate")
    named = [f"{key}={value}" for key, value in changes.items() if key not in rates]
    latencies = {
        metric: (_MS * found["median"], _MS * _percentile(found["percentiles"]))
        for metric in METRICS
        if (found := outcome[metric])
    }
    series = ", ".join(["simulated", *named])
    throughput = outcome["request_throughput"]
    offered = next((changes[rate] for rate in rates if rate in changes), throughput)
    return Point(series, float(offered), throughput, latencies)


def _percentile(percentiles: dict[str, float]) -> float:
    """The 99th percentile; the spelling of its name depends on the program that wrote it."""
    return next(value for name, value in percentiles.items() if float(name) == 99)


def _served(result: dict[str, Any], name: str) -> Point:
    latencies = {}
    for metric in METRICS:
        median, worst = result.get(f"median_{metric}_ms"), result.get(f"p99_{metric}_ms")
        if median is not None and worst is not None:
            latencies[metric] = (median, worst)
    series = result.get("label") or result.get("backend") or name
    throughput = result["request_throughput"]
    return Point(series, float(result.get("request_rate", throughput)), throughput, latencies)


def draw(points: Iterable[Point], metrics: Sequence[str] = ("ttft", "tpot")) -> Any:
    """One panel per metric, one line per series: medians solid, 99th percentiles dashed.

    Parameters
    ----------
    metrics
        Keys of ``METRICS``.
    """
    by_series: dict[str, list[Point]] = {}
    # Sorted by the offered load, because throughput no longer grows when a server is saturated.
    for point in sorted(points, key=lambda point: (point.offered, point.throughput)):
        by_series.setdefault(point.series, []).append(point)
    figure = new_figure(4.5 * len(metrics), 3.6)
    for number, metric in enumerate(metrics):
        axes = figure.add_subplot(1, len(metrics), number + 1)
        for place, (series, its) in enumerate(by_series.items()):
            has = [point for point in its if metric in point.latencies]
            colour = COLOURS[place % len(COLOURS)]
            loads = [point.throughput for point in has]
            for which, style, label in ((0, "-", series), (1, "--", f"{series}, p99")):
                values = [point.latencies[metric][which] for point in has]
                axes.plot(loads, values, style, color=colour, marker="o", markersize=3, label=label)
        axes.set_xlabel("Requests per second")
        axes.set_ylabel(METRICS[metric])
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    return figure
