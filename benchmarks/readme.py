"""Writes all tables of docs/figures.md and the README's one chart from the newest results.

    python -m benchmarks.readme           # writes both pages, and docs/pictures/peers.svg
    python -m benchmarks.readme --check   # reports which of them that would change

This program owns the picture, and in both pages everything between the two markers. Its sources are
the last complete run of `nox -s bench` (results/suites.jsonl), and per model the last one of
`nox -s bench-peers` (results/peers.jsonl) and of `nox -s bench-peers -- servers`
(results/servers.jsonl).
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.chart import Bars, Panel, draw
from benchmarks.record import RESULTS
from src.core.settings import CHECKOUT

README: Final = CHECKOUT / "README.md"
PAGE: Final = CHECKOUT / "docs" / "figures.md"
CHART_LINK: Final = "docs/pictures/peers.svg"
CHART: Final = CHECKOUT / CHART_LINK
BEGIN: Final = "<!-- figures: written by benchmarks/readme.py -->"
END: Final = "<!-- end of figures -->"
WIDTH: Final = 118
"""Of a line of text; a law allows 120."""

Line = dict[str, Any]
# With a higher load per CPU before the run, other programs affected the figures.
_QUIET_LOAD = 0.25
_BUSY_CORES = 0.25

END_TO_END: Final = (
    ("one stream, time to first token", "one stream, 128 tokens in: time to first token"),
    ("one stream, time per output token", "one stream: time per output token"),
    ("32 streams, time per token of all", "32 streams: output tokens per second"),
)
END_TO_END_CASES: Final = {
    "demo, in process": "demo model, in process",
    "demo, http": "demo model, over HTTP",
    "7m, in process": "7 M parameters, in process",
}
PEER_COLUMNS: Final = (
    ("one", "ttft", "one stream: first token, ms"),
    ("one", "tpot", "per token, ms"),
    ("many", "output", "32 streams, tok/s"),
    ("prefill", "prefill", "prompt of 2,048, tok/s"),
    ("shared-cold", "output", "shared prefix, tok/s"),
    ("shared-warm", "output", "again, tok/s"),
    ("start-cold", "start", "cold start, s"),
    ("start-warm", "start", "warm start, s"),
)
SERVER_COLUMNS: Final = (
    ("output_throughput", "{} streams: tok/s"),
    ("ttft_median", "first token, ms"),
    ("ttft_p99", "p99"),
    ("itl_median", "between tokens, ms"),
)
SHAPE_NAMES: Final = {
    "7m": "7 M parameters",
    "0.35b": "0.35 B parameters",
    "moe": "0.56 B parameters, 24 experts a layer and 0.15 B active",
}

CHART_SHAPE: Final = "0.35b"
"""The largest dense model that all engines were measured on."""
CHART_PANELS: Final = (
    ("one", "ttft", Panel("first token", "ms", more_is_better=False)),
    ("one", "tpot", Panel("each further token", "ms", more_is_better=False)),
    ("many", "output", Panel("32 streams", "tokens/s", more_is_better=True)),
    ("prefill", "prefill", Panel("prompt of 2,048", "tokens/s", more_is_better=True)),
)
_BITS: Final = {"int8": 8, "Q8_0": 8, "int4": 4, "Q4_0": 4}
"""Bits of a weight by an engine's option; 16 without one of these."""


def lines_of(name: str, folder: Path = RESULTS) -> list[Line]:
    """Results of a benchmark, oldest first; none if it was never run."""
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def runs_of(lines: Sequence[Line]) -> list[list[Line]]:
    """Runs, oldest first: lines of the same commit, machine (with its load before) and versions."""
    runs: dict[str, dict[str, Line]] = {}
    for line in lines:
        about = json.dumps([line[name] for name in ("commit", "machine", "versions")])
        runs.setdefault(about, {})[line["measure"]] = line
    return [list(run.values()) for run in runs.values()]


def last_whole_run(lines: Sequence[Line]) -> list[Line]:
    """The newest run with ops and the whole engine; later runs may only cover a part."""
    ends = {group for group, _ in END_TO_END}
    whole = [
        run for run in runs_of(lines)
        if any("op" in line for line in run) and any(line["group"] in ends for line in run)
    ]  # fmt: skip
    return whole[-1] if whole else []


def last_contest(lines: Sequence[Line]) -> list[Line]:
    """The newest of the runs with the most engines, regardless of their options.

    Figures of different runs are not comparable.
    """
    runs = reversed(runs_of(lines))
    return max(runs, key=lambda run: len({_engine(line) for line in run}), default=[])


def _engine(line: Line) -> str:
    name: str = line["peer"]
    return name.partition(",")[0]


def section(suites: Sequence[Line], peers: Sequence[Line], servers: Sequence[Line] = ()) -> str:
    """All tables: the text between the markers of the page of figures."""
    parts: list[str] = []
    run = last_whole_run(suites)
    if run:
        parts += ["## Slipstream alone", _where(run[0]), _end_to_end(run), _per_token(run)]
        parts += ["## Kernels", _ops(run)]
    for shape in dict.fromkeys(line["shape"] for line in peers):
        parts.append(f"## Engines, {_model(shape)}")
        parts += _peers(shape, last_contest([line for line in peers if line["shape"] == shape]))
    if servers:
        parts += ["## Servers over HTTP", *_servers(runs_of(servers)[-1])]
    return "\n\n".join(_wrapped(part) for part in parts if part)


def _wrapped(part: str) -> str:
    """A paragraph in lines of the pages' length; a table or a list as it is."""
    if "\n" in part:
        return part
    return textwrap.fill(part, WIDTH, break_long_words=False, break_on_hyphens=False)


def _where(line: Line) -> str:
    machine, versions = line["machine"], line["versions"]
    flags = ", ".join(machine["flags"])
    return (
        f"`{line['command']}` on {_cpus(line)} of an {machine['cpu']} ({flags}), "
        f"{machine['memory_gib']:g} GiB, Python {versions['python']}, torch {versions['torch']}, "
        f"at {line['commit']}, {line['time'][:10]}. Medians.{_noise(machine)}"
    )


def _cpus(line: Line) -> str:
    count = line["machine"]["cpus"]
    return "1 CPU" if count == 1 else f"{count} CPUs"


def _noise(machine: dict[str, Any]) -> str:
    load = machine["load_before"]
    if load <= _QUIET_LOAD * machine["cpus"]:
        return ""
    return f" **The machine was not quiet** (load {load:g} before the run): expect other figures."


def _end_to_end(run: Sequence[Line]) -> str:
    found = {(line["group"], line.get("case")): line for line in run}
    rows = []
    for group, title in END_TO_END:
        cells = []
        for case in END_TO_END_CASES:
            line = found.get((group, case))
            cells.append("" if line is None else _duration_or_rate(line))
        rows.append([title, *cells])
    for case in ("cold", "warm"):
        line = found.get(("start to first token", case))
        if line is not None:
            title = f"{case} start: process start to first token"
            rows.append([title, _seconds(line["figures"]["seconds"]["median"]), "", ""])
    return _table(["", *END_TO_END_CASES.values()], rows)


def _duration_or_rate(line: Line) -> str:
    if "tok/s" in line:
        return f"{line['tok/s']:,.0f}"
    return _seconds(line["figures"]["seconds"]["median"])


def _seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def _per_token(run: Sequence[Line]) -> str:
    """The host's costs that do not depend on the model, one sentence each."""
    median = {
        (line["group"], line.get("case", line.get("requests before"))): line["figures"]["seconds"][
            "median"
        ]
        for line in run
    }
    said = []
    loop = median.get(("loop time per streamed token", "hypercorn"))
    if loop is not None:
        said.append(
            f"A streamed token costs the event loop {_seconds(loop)}, requests and HTTP included."
        )
    history = "scheduler, 32 rows after a history"
    steps = [median.get((history, count)) for count in (10, 1000, 100_000)]
    if all(step is not None for step in steps):
        shown = [_seconds(step) for step in steps if step is not None]
        said.append(
            f"Planning and committing a step of 32 rows takes {shown[0]} after 10 requests, "
            f"{shown[1]} after 1,000 and {shown[2]} after 100,000."
        )
    return " ".join(said)


def _ops(run: Sequence[Line]) -> str:
    rows = [
        [
            f"{line['op']}: {line['case']}",
            _seconds(line["figures"]["seconds"]["median"]),
            f"{100 * line['fraction of roofline']:.0f} % ({line['bound by']})",
        ]
        for line in run
        if "op" in line
    ]
    if not rows:
        return ""
    first = next(line for line in run if "op" in line)
    return (
        f"Kernels on one core, which reads {first['machine GB/s']:.1f} GB/s and does "
        f"{first['machine GFLOP/s']:.0f} GFLOP/s, measured in the same run:\n\n"
        + _table(["Op", "median", "of the roofline"], rows)
    )


def _model(shape: str) -> str:
    """What all engines served: a shape with random weights, or the file of that name."""
    named = SHAPE_NAMES.get(shape)
    return f"the file {shape}.gguf" if named is None else f"a model of {named}"


def _peers(shape: str, lines: Sequence[Line]) -> list[str]:
    found = {(line["peer"], line.get("workload")): line for line in lines}
    names = list(dict.fromkeys(line["peer"] for line in lines))
    rows = []
    for name in names:
        mine = [line for (peer, _), line in found.items() if peer == name]
        if not any(line["figures"] for line in mine):
            continue
        cells = [_peer_cell(found.get((name, workload)), figure)
                 for workload, figure, _ in PEER_COLUMNS]  # fmt: skip
        rows.append([_peer_name(name, mine[-1]), *cells])
    latest = lines[-1]
    busy = latest["busy_cores_of_others"]
    shared = (
        f" **The machine was shared** (others kept {busy:.1f} cores busy between turns): orders of "
        "magnitude at most."
        if busy > _BUSY_CORES
        else ""
    )
    # A start that failed halfway has fewer values.
    starts = max(
        (line["figures"]["start"]["repeats"] for line in lines if "start" in line["figures"]),
        default=1,
    )
    weights = ", random weights" if shape in SHAPE_NAMES else ""
    about = (
        f"Other engines on {_model(shape)}{weights}, the same token ids, in turns. With weights of "
        "8 and 4 bits all round what they multiply them by to 8 bits as well, unless inputs are "
        "said to be exact (Slipstream: docs/quantization.md); groups of 4 bits are of 32. "
        + (f"Starts are medians of {starts}. " if starts > 1 else "Each start was timed once. ")
        + _where(latest)
        + shared
    )
    missing = [f"{name}: {found[name, None]['failure']}" for name in names if (name, None) in found]
    heads = ["", *(head for _, _, head in PEER_COLUMNS)]
    return [about, _table(heads, rows), *(f"Missing: {why}" for why in missing)]


def _servers(lines: Sequence[Line]) -> list[str]:
    found = {(line["server"], line["streams"]): line for line in lines}
    names = list(dict.fromkeys(line["server"] for line in lines))
    counts = list(dict.fromkeys(line["streams"] for line in lines))
    one = lines[0]
    about = (
        f"Servers over HTTP, the same model of {SHAPE_NAMES.get(one['shape'], one['shape'])}: "
        f"{one['input_len']} tokens in and {one['output_len']} out, as many streams at once, four "
        "requests each, from one client on the same CPUs, in turns. " + _where(one)
    )
    heads = ["", *(head.format(count) for count in counts for _, head in SERVER_COLUMNS)]
    rows = [
        [name, *(_peer_cell(found.get((name, count)), figure)
                 for count in counts for figure, _ in SERVER_COLUMNS)]
        for name in names
    ]  # fmt: skip
    return [about, _table(heads, rows)]


def _peer_name(name: str, line: Line) -> str:
    return f"{name} {line['peer_version']}"


def _median(line: Line | None, figure: str) -> float | None:
    if line is None or figure not in line["figures"]:
        return None
    median: float = line["figures"][figure]["median"]
    return median


def _peer_cell(line: Line | None, figure: str) -> str:
    median = _median(line, figure)
    if median is None:
        return ""
    return f"{median:,.0f}" if median >= 100 else f"{median:.3g}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chart(peers: Sequence[Line]) -> str:
    """The picture of the newest contest on the chart's model, as SVG.

    Raises
    ------
    ValueError
        There is none.
    """
    lines = _chart_lines(peers)
    groups: dict[str, list[Bars]] = {f"weights of {bits} bits": [] for bits in (16, 8, 4)}
    for name in dict.fromkeys(line["peer"] for line in lines):
        mine = {line.get("workload"): line for line in lines if line["peer"] == name}
        values = [_median(mine.get(workload), figure) for workload, figure, _ in CHART_PANELS]
        if any(value is not None for value in values):
            engine, _, option = name.partition(", ")
            shown = "" if option == "generate" else option
            version = next(iter(mine.values()))["peer_version"]
            bars = Bars(
                " ".join(filter(None, (engine, shown, version))),
                engine == "slipstream",
                values,
                [_peer_cell(mine.get(workload), figure) for workload, figure, _ in CHART_PANELS],
            )
            groups[f"weights of {_BITS.get(option, 16)} bits"].append(bars)
    notes = [
        "One stream of 128 tokens in and 128 out; 32 streams of 128 in and 64 out; one prompt of "
        "2,048 tokens.",
        f"Random weights, the same token ids, in turns, on an {lines[0]['machine']['cpu']} with "
        f"load {lines[0]['machine']['load_before']:g} before the run. "
        f"Medians, {lines[0]['time'][:10]}.",
        "With weights of 8 and 4 bits all round what they multiply them by to 8 bits as well.",
    ]
    return draw(
        f"One model of {SHAPE_NAMES[CHART_SHAPE]} in every engine, on {_cpus(lines[0])}",
        notes,
        [panel for _, _, panel in CHART_PANELS],
        {name: group for name, group in groups.items() if group},
    )


def summary(peers: Sequence[Line]) -> str:
    """The text between README's markers: the picture, and what it does not tell."""
    lines = _chart_lines(peers)
    *names, last = dict.fromkeys(_engine(line) for line in lines)
    machine = lines[0]["machine"]
    quiet = "was" if _noise(machine) == "" else "**was not**"
    said = (
        f"{', '.join(names)} and {last} on one small model of random weights, in turns, on "
        f"{_cpus(lines[0])} of an {machine['cpu']} that {quiet} quiet (load "
        f"{machine['load_before']:g} before the run, {lines[0]['time'][:10]}): other machines and "
        "models have other ratios, and [docs/figures.md](docs/figures.md) has every table and its "
        "conditions."
    )
    picture = f"![Bars: a model of {SHAPE_NAMES[CHART_SHAPE]} in every engine]({CHART_LINK})"
    return f"{picture}\n\n{_wrapped(said)}"


def _chart_lines(peers: Sequence[Line]) -> list[Line]:
    lines = last_contest([line for line in peers if line["shape"] == CHART_SHAPE])
    if not lines:
        raise ValueError(f"no engine was measured on the model {CHART_SHAPE}")
    return lines


def rewritten(text: str, figures: str) -> str:
    """The page with ``figures`` between its markers.

    Raises
    ------
    ValueError
        It does not have exactly one of each marker.
    """
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended or BEGIN in after or END in after:
        raise ValueError(f"expected {BEGIN!r} and {END!r} once each, in this order")
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


def files() -> dict[Path, str]:
    """What this program writes, by path: both pages and the picture."""
    peers = lines_of("peers")
    tables = section(lines_of("suites"), peers, lines_of("servers"))
    return {
        PAGE: rewritten(PAGE.read_text(), tables),
        CHART: chart(peers),
        README: rewritten(README.read_text(), summary(peers)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    options = parser.parse_args()
    stale = {
        path: text
        for path, text in files().items()
        if not path.is_file() or path.read_text() != text
    }
    if options.check and stale:
        names = ", ".join(str(path.relative_to(CHECKOUT)) for path in stale)
        sys.exit(f"not what the results say: {names}")
    for path, text in stale.items() if not options.check else ():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
