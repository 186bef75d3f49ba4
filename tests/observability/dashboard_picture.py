"""Draws the Grafana dashboard's panels from what Prometheus answers; this is not Grafana.

    python -m tests.observability.dashboard_picture     # writes docs/pictures/dashboard.png

It starts a server of the demo model and a Prometheus that scrapes it, sends a load of many kinds
for a minute and a half, and asks every query of the dashboard over that time, as Grafana would. It
prints the queries that have no data, and ends with 1 if there are any. Needs `prometheus` on PATH.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from PIL import Image, ImageColor

from src.bench.plots.canvas import new_figure, write
from src.core.settings import CHECKOUT
from tests.http.processes import ServerProcess
from tests.observability.dashboard import Query, dashboard
from tests.observability.prometheus_scrape import Prometheus

PICTURE: Final = CHECKOUT / "docs" / "pictures" / "dashboard.png"
INTERVAL: Final = "10s"
"""What Grafana would put in for $__rate_interval, of scrapes every second."""
LOAD_SECONDS: Final = 90.0
SETTINGS: Final = {
    "SLIPSTREAM_CONFIG": "configs/demo.toml",
    # Little of everything, so that there is something to see of waiting, preemption and refusals.
    "SLIPSTREAM_MODEL__MAX_MODEL_LEN": "512",
    "SLIPSTREAM_CACHE__NUM_BLOCKS": "56",
    "SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS": "12",
    "SLIPSTREAM_SCHEDULER__MAX_WAITING_REQUESTS": "10",
}

GROUND: Final = "#111217"
PANEL: Final = "#1b1e24"
INK: Final = "#d8d9da"
SOFT: Final = "#9fa3a9"
LINE: Final = "#33373e"
COLOURS: Final = (
    *("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#37872d"),
)
ACROSS: Final = 24
"""Columns of a dashboard's grid."""


@dataclass(frozen=True)
class Series:
    """One line of a panel: its legend, and points as (seconds, value)."""

    legend: str
    points: Sequence[tuple[float, float]]


Results = Mapping[tuple[str, str], Sequence[Series]]
"""(panel's title, query's expression) -> its lines"""


def series_of(answer: Sequence[Mapping[str, Any]], legend: str) -> list[Series]:
    """Prometheus' matrix as lines, without points that are no numbers."""
    found = []
    for entry in answer:
        name = legend
        for label, text in entry["metric"].items():
            name = name.replace(f"{{{{{label}}}}}", text)
        points = [(float(at), float(value)) for at, value in entry["values"]]
        found.append(Series(name, [point for point in points if math.isfinite(point[1])]))
    return [series for series in found if series.points]


def ask(prometheus: Prometheus, start: float, end: float) -> dict[tuple[str, str], list[Series]]:
    """The lines of every query of the dashboard over a time."""
    results = {}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = Query(panel["title"], target["expr"], target["legendFormat"])
            answer = prometheus.ask(
                "query_range",
                query=query.filled_in("demo", INTERVAL),
                start=str(start),
                end=str(end),
                step="1",
            )["result"]
            results[panel["title"], target["expr"]] = series_of(answer, query.legend)
    return results


def without_data(results: Results) -> list[str]:
    """Queries that no line came of."""
    return [f"{panel}: {expression}" for (panel, expression), found in results.items() if not found]


def shown(value: float, unit: str) -> str:
    """A value in Grafana's units, as far as the dashboard uses them."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        for scale, name in ((1.0, "s"), (1e-3, "ms")):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {name}"
        return f"{value / 1e-6:.3g} µs" if value else "0"
    if unit == "bytes":
        for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if abs(value) >= 1 << power:
                return f"{value / (1 << power):.3g} {name}"
        return f"{value:.0f} B"
    number = f"{value / 1000:.3g} K" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} /s" if unit == "reqps" else number


def draw(document: Mapping[str, Any], results: Results) -> Any:
    """A figure of all panels at their places in the grid."""
    panels = document["panels"]
    down = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = new_figure(12.0, 0.27 * down + 0.5)
    figure.set_layout_engine("none")
    figure.set_facecolor(GROUND)
    top, below = 0.45 / figure.get_figheight(), 0.15 / figure.get_figheight()
    unit = (1 - top - below) / down
    figure.text(
        *(0.012, 1 - 0.3 / figure.get_figheight()),
        "Panels of configs/grafana/dashboards/slipstream.json, drawn from Prometheus' answers "
        "(not by Grafana): a load on the demo model",
        color=INK, fontsize=10, va="center",
    )  # fmt: skip
    for panel in panels:
        place = panel["gridPos"]
        left = place["x"] / ACROSS
        bottom = 1 - top - (place["y"] + place["h"]) * unit
        if panel["type"] == "row":
            figure.text(left + 0.012, bottom + 0.4 * unit, panel["title"],
                        color=INK, fontsize=10, weight="bold", va="center")  # fmt: skip
            continue
        width, height = place["w"] / ACROSS, place["h"] * unit
        axes = figure.add_axes(
            (left + 0.045, bottom + 0.27 * height, width - 0.06, 0.52 * height), facecolor=PANEL
        )
        axes.set_title(panel["title"], color=INK, fontsize=8.5, loc="left", x=-0.12)
        _fill(axes, panel, [
            series for target in panel["targets"]
            for series in results[panel["title"], target["expr"]]
        ])  # fmt: skip
    return figure


def _fill(axes: Any, panel: Mapping[str, Any], lines: Sequence[Series]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults.get("unit", "short")
    for side in axes.spines.values():
        side.set_color(LINE)
    if panel["type"] == "stat":
        _numbers(axes, lines, unit)
        return
    begin = min((series.points[0][0] for series in lines), default=0.0)
    is_stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
    _lines(axes, lines, begin, is_stacked)
    axes.set_ylim(bottom=defaults.get("min"), top=defaults.get("max"))
    if not any(value for series in lines for _, value in series.points):
        axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: shown(value, unit))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
    axes.locator_params(axis="y", nbins=4)
    axes.locator_params(axis="x", nbins=5)
    axes.tick_params(colors=SOFT, labelsize=6.5, length=0)
    axes.grid(visible=True, color=LINE, linewidth=0.5)
    axes.set_axisbelow(True)
    if lines:
        widest = max(len(series.legend) for series in lines)
        axes.legend(
            *(axes.get_legend_handles_labels()),
            loc="upper left", bbox_to_anchor=(-0.13, -0.13), fontsize=6.5,
            ncols=4 if widest < 15 else 2,
            labelcolor=INK, frameon=False, handlelength=1.2, columnspacing=1.0, labelspacing=0.2,
        )  # fmt: skip
    else:
        axes.text(0.5, 0.5, "No data", color=SOFT, ha="center", transform=axes.transAxes)


def _lines(axes: Any, lines: Sequence[Series], begin: float, is_stacked: bool) -> None:
    below: dict[float, float] = {}
    for number, series in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        times = [at - begin for at, _ in series.points]
        floor = [below.get(at, 0.0) if is_stacked else 0.0 for at, _ in series.points]
        values = [base + value for base, (_, value) in zip(floor, series.points, strict=True)]
        axes.plot(times, values, color=colour, linewidth=1.1, label=series.legend)
        axes.fill_between(times, floor, values, color=colour, alpha=0.2 if is_stacked else 0.05)
        below.update(zip((at for at, _ in series.points), values, strict=True))


def _numbers(axes: Any, lines: Sequence[Series], unit: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    rows = max(1, math.ceil(len(lines) / 3))
    for number, series in enumerate(lines):
        x, y = number % 3 / 3 + 0.03, 1 - (number // 3 + 0.5) / rows
        axes.text(
            x, y, series.legend, color=SOFT, fontsize=6.5, va="bottom", transform=axes.transAxes
        )
        axes.text(x, y, shown(series.points[-1][1], unit), color=COLOURS[0], fontsize=8.5,
                  va="top", transform=axes.transAxes)  # fmt: skip


def to_palette(path: Path) -> None:
    """Save a picture in its own colours and 16 shades of each: a third of the bytes."""
    drawn = [ImageColor.getrgb(colour)[:3] for colour in (*COLOURS, GROUND, LINE, INK, SOFT)]
    ground = ImageColor.getrgb(PANEL)[:3]
    values = [*ground]
    for colour in drawn:
        for share in range(1, 17):
            values += [
                round(low + (high - low) * share / 16)
                for high, low in zip(colour, ground, strict=True)
            ]
    palette = Image.new("P", (1, 1))
    palette.putpalette(values)
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def load(url: str, seconds: float) -> None:
    """Requests of many kinds: more and more at once, then fewer; each thread asks one at a time."""
    deadline = time.monotonic() + seconds
    stories = [f"Once upon a time, a {animal} " * 6 for animal in ("fox", "bear", "cat", "hare")]

    def one(number: int, chance: random.Random) -> None:
        # The later a thread's number, the later it begins and the sooner it ends.
        time.sleep(seconds * number / 60)
        while time.monotonic() < deadline - seconds * number / 90:
            body: dict[str, Any] = {
                "model": "demo" if chance.random() > 0.02 else "other",
                "prompt": chance.choice(stories) + str(chance.randrange(20)),
                "max_tokens": chance.choice((8, 30, 60, 120)),
                "temperature": 0.8,
                "stream": True,
            }
            if chance.random() < 0.05:
                body["timeout"] = 0.5
            leaves = chance.random() < 0.03
            with (
                httpx.Client(timeout=60) as client,
                client.stream("POST", f"{url}/v1/completions", json=body) as answer,
            ):
                for _ in answer.iter_lines():
                    if leaves:
                        break
            time.sleep(0.05 * chance.random())

    with ThreadPoolExecutor(30) as threads:
        for future in [threads.submit(one, number, random.Random(number)) for number in range(30)]:
            future.result()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.observability.dashboard_picture", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    parser.add_argument("--seconds", type=float, default=LOAD_SECONDS)
    options = parser.parse_args()
    with ServerProcess.serve(SETTINGS) as server, tempfile.TemporaryDirectory() as folder:
        server.wait_ready()
        prometheus = Prometheus(Path(folder), f"127.0.0.1:{server.port}")
        try:
            prometheus.wait_until(lambda: prometheus.value('up{job="slipstream"}') == 1)
            start = time.time()
            load(server.url, options.seconds)
            end = time.time() + 3
            prometheus.wait_until(lambda: time.time() > end)
            results = ask(prometheus, start, end)
        finally:
            prometheus.stop()
    options.output.parent.mkdir(exist_ok=True)
    write(draw(dashboard(), results), options.output)
    to_palette(options.output)
    empty = without_data(results)
    print(f"{options.output}: {len(results)} queries, {len(empty)} without data", *empty, sep="\n")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
