"""Draw a piece of a saved timeline as an SVG picture, for the documentation.

    python -m src inspect --output trace.json
    python -m benchmarks.draw_timeline trace.json docs/timeline.svg --from-step 90 --steps 8

It reads what ui.perfetto.dev reads, so it also shows that the file says what it is meant to say.
"""

from __future__ import annotations

import argparse
import itertools
import json
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, ROW, GAP = 1200, 110, 22, 6
COLOURS = {
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draw_timeline", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--from-step", type=int, metavar="ID", help="default: from the first one")
    parser.add_argument("--steps", type=int, default=8, metavar="N")
    parser.add_argument("--lanes", type=int, default=8, metavar="N", help="tracks of completions")
    return parser.parse_args()


def main() -> None:
    options = parse()
    document = json.loads(options.trace.read_text())
    first = options.from_step or document["otherData"]["first_step"]
    options.picture.write_text(draw(document, first, options.steps, options.lanes))
    print(f"{options.picture}: {options.picture.stat().st_size} bytes")


def draw(document: dict[str, Any], first: int, steps: int, lanes: int) -> str:
    """The SVG of ``steps`` steps from step ``first`` on."""
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    named = {event["name"]: event for event in slices}
    begin = named[f"plan {first}"]["ts"]
    last = named[f"publish {first + steps - 1}"]
    end = last["ts"] + last["dur"]
    scale = (WIDTH - LEFT - 10) / (end - begin)
    tracks = [(1, 1, "event loop"), (2, 1, "device")]
    tracks += [(3, lane, f"completions {lane}") for lane in range(1, lanes + 1)]
    body: list[str] = []
    places: dict[tuple[int, int], float] = {}
    for number, (process, thread, title) in enumerate(tracks):
        top = 30 + number * (ROW + GAP) + (12 if process == 3 else 0)
        places[process, thread] = top
        body.append(f'<text x="4" y="{top + 15}">{title}</text>')
        for event in slices:
            if (event["pid"], event["tid"]) == (process, thread):
                body += _rectangle(event, begin, end, scale, top)
    body += _arrows(document, begin, end, scale, places)
    height = 30 + len(tracks) * (ROW + GAP) + 40
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *_axis(end - begin, scale, height),
            *body,
            *_legend(height),
            "</svg>\n",
        ]
    )


def _rectangle(
    event: dict[str, Any], begin: float, end: float, scale: float, top: float
) -> list[str]:
    start, until = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
    kind = event["name"].split()[0]
    if until <= start:
        return []
    x, width = LEFT + (start - begin) * scale, max(0.4, (until - start) * scale)
    inset = 0 if kind == "request" or event["pid"] != 3 else 3
    title = f"{event['name']}: {event['dur'] / 1000:.3f} ms"
    text = (
        f'<text x="{x + 3:.1f}" y="{top + 15}">{escape(event["name"])}</text>'
        if width > 6.5 * len(event["name"]) and kind != "request"
        else ""
    )
    return [
        f'<rect x="{x:.1f}" y="{top + inset}" width="{width:.2f}" height="{ROW - 2 * inset}" '
        f'fill="{COLOURS.get(kind, "#ccc")}"><title>{escape(title)}</title></rect>{text}'
    ]


def _arrows(
    document: dict[str, Any],
    begin: float,
    end: float,
    scale: float,
    places: dict[tuple[int, int], float],
) -> list[str]:
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] in ("s", "t", "f"):
            flows.setdefault(event["id"], []).append(event)
    lines = []
    for events in flows.values():
        for one, other in itertools.pairwise(events):
            inside = begin <= one["ts"] and other["ts"] <= end
            if inside and all((e["pid"], e["tid"]) in places for e in (one, other)):
                points = " ".join(
                    f"{LEFT + (e['ts'] - begin) * scale:.1f},"
                    f"{places[e['pid'], e['tid']] + ROW / 2:.1f}"
                    for e in (one, other)
                )
                lines.append(f'<polyline points="{points}" fill="none" stroke="#444"/>')
    return lines


def _legend(height: float) -> list[str]:
    lines = []
    for number, (kind, colour) in enumerate(COLOURS.items()):
        x = LEFT + 95 * number
        lines.append(
            f'<rect x="{x}" y="{height - 17}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{x + 16}" y="{height - 7}">{kind}</text>'
        )
    return lines


def _axis(microseconds: float, scale: float, height: float) -> list[str]:
    unit = 10 ** len(str(int(microseconds / 10))) / 10
    unit = next(unit * n for n in (1, 2, 5, 10, 20, 50) if microseconds / (unit * n) <= 12)
    lines = []
    at = 0.0
    while at <= microseconds:
        x = LEFT + at * scale
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{height - 20}" stroke="#e5e5e5"/>'
            f'<text x="{x + 2:.1f}" y="14">{at / 1000:g} ms</text>'
        )
        at += unit
    return lines


if __name__ == "__main__":
    main()
