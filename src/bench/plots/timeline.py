"""Plots part of a saved timeline: host, device and completions.

It reads the same file as ui.perfetto.dev (from ``python -m src inspect``), so it also verifies the
contents of that file.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final

from src.bench.plots.canvas import NothingToDraw, new_figure, read_json
from src.core.errors import ConfigError

COLOURS: Final = {
    "plan": "#4c78a8",
    "launch": "#72b7b2",
    "commit": "#f58518",
    "publish": "#eeca3b",
    "step": "#54a24b",
    "bubble": "#e45756",
    "tokenize": "#bab0ac",
    "wait": "#d8d3d0",
    "prefill": "#b279a2",
    "decode": "#9ecae9",
    "request": "#f4f4f4",
}
_OTHERS: Final = "#cccccc"
_COMPLETIONS: Final = 3  # the trace's process of completions
_MS: Final = 1000.0


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace that ``python -m src inspect`` saved.

    Raises
    ------
    ConfigError
        It cannot be read, or is not a trace.
    """
    document = read_json(path)
    if not isinstance(document, dict) or not {"traceEvents", "otherData"} <= document.keys():
        raise ConfigError(f"{path}: not a trace of `python -m src inspect`")
    return document


def draw(document: dict[str, Any], *, first: int | None, steps: int, lanes: int) -> Any:
    """Plot ``steps`` steps from step ``first`` on (``None``: the first in the trace), and up to
    ``lanes`` lanes of completions.

    Raises
    ------
    NothingToDraw
        The trace lacks some of these steps.
    """
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    first = document["otherData"]["first_step"] if first is None else first
    begin, end = _span(slices, first, first + steps - 1)
    tracks = [(1, 1, "event loop"), (2, 1, "device")]
    tracks += [(_COMPLETIONS, lane, f"completions {lane}") for lane in range(1, lanes + 1)]
    figure = new_figure(11.0, 0.6 + 0.28 * len(tracks))
    axes = figure.add_subplot()
    places = {(process, thread): number for number, (process, thread, _) in enumerate(tracks)}
    for event in slices:
        place = places.get((event["pid"], event["tid"]))
        if place is not None:
            _bar(axes, event, place, begin, end)
    _arrows(axes, document, places, begin, end)
    for kind, colour in COLOURS.items():
        axes.broken_barh([], (0, 0), color=colour, label=kind)
    axes.set_xlim(0, (end - begin) / _MS)
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.set_yticks(range(len(tracks)), [title for _, _, title in tracks], fontsize=8)
    axes.set_xlabel("milliseconds")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(ncols=len(COLOURS), fontsize=6.5, loc="outside lower center", frameon=False)
    return figure


def _span(slices: list[dict[str, Any]], first: int, last: int) -> tuple[float, float]:
    named = {event["name"]: event for event in slices}
    try:
        begun, told = named[f"plan {first}"], named[f"publish {last}"]
    except KeyError as error:
        raise NothingToDraw(f"the trace has no slice {error}") from None
    return begun["ts"], told["ts"] + told["dur"]


def _bar(axes: Any, event: dict[str, Any], place: int, begin: float, end: float) -> None:
    start, until = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
    if until <= start:
        return
    kind = event["name"].split()[0]
    inset = 0.12 if event["pid"] == _COMPLETIONS and kind != "request" else 0.0
    left, width = (start - begin) / _MS, (until - start) / _MS
    axes.broken_barh(
        [(left, width)],
        (place - 0.4 + inset, 0.8 - 2 * inset),
        facecolors=COLOURS.get(kind, _OTHERS),
    )
    # A slice that is too narrow for its name is not labelled.
    if kind != "request" and (until - start) / (end - begin) > 0.0085 * len(event["name"]):
        axes.text(left, place, f" {event['name']}", va="center", fontsize=7, clip_on=True)


def _arrows(
    axes: Any, document: dict[str, Any], places: dict[tuple[int, int], int], begin: float,
    end: float,
) -> None:  # fmt: skip
    """Arrows from a launch to the step on the device, and from there to its commit."""
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] in ("s", "t", "f"):
            flows.setdefault(event["id"], []).append(event)
    for events in flows.values():
        for one, other in itertools.pairwise(events):
            ends = [places.get((event["pid"], event["tid"])) for event in (one, other)]
            if None not in ends and begin <= one["ts"] and other["ts"] <= end:
                times = [(event["ts"] - begin) / _MS for event in (one, other)]
                axes.plot(times, ends, color="#444444", linewidth=0.6)
