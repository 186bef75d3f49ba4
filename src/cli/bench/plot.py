"""``python -m src bench plot``: plots result files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from src.cli.bench.dataset_options import positive
from src.cli.options import Commands
from src.core.settings import CHECKOUT

ABOUT: Final = "Draw result files, as SVG or PNG."
SUITES: Final = CHECKOUT / "benchmarks" / "results" / "suites.jsonl"
_METRICS: Final = ("ttft", "tpot", "e2el")


def add_command(commands: Commands) -> None:
    """Declare the command with a subcommand per plot."""
    parser = commands.add_parser("plot", help=ABOUT, description=ABOUT)
    kinds = parser.add_subparsers(title="pictures", metavar="PICTURE", required=True)
    load = _add(kinds, "load", "Latency against load, of files of bench serve and simulate.", _load)
    load.add_argument("files", nargs="+", type=Path, metavar="FILE")
    load.add_argument(
        "--metrics", default=("ttft", "tpot"), type=_metrics, metavar="NAMES",
        help=f"of {', '.join(_METRICS)}, with commas between them (default: ttft,tpot)",
    )  # fmt: skip
    roof = _add(
        kinds, "roofline", "What each op reaches of what the machine could, of nox -s bench.", _roof
    )
    roof.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help="default: benchmarks/results/suites.jsonl",
    )  # fmt: skip
    line = _add(
        kinds, "timeline", "A piece of a run, of a trace that inspect has saved.", _timeline
    )
    line.add_argument("file", type=Path, metavar="TRACE")
    line.add_argument(
        "--from-step", type=positive, metavar="ID", help="default: from the first one"
    )
    line.add_argument("--steps", type=positive, default=8, metavar="N", help="default: 8")
    line.add_argument(
        "--lanes", type=positive, default=8, metavar="N", help="tracks of completions (default: 8)"
    )


def _add(kinds: Any, name: str, about: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=about, description=about)
    parser.set_defaults(run=run)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="ends in .svg or .png"
    )
    return parser


def _load(arguments: argparse.Namespace) -> int:
    from src.bench.plots import load

    return _write(arguments, load.draw(load.read_points(arguments.files), arguments.metrics))


def _roof(arguments: argparse.Namespace) -> int:
    from src.bench.plots import roofline

    files = arguments.files or [SUITES]
    return _write(arguments, roofline.draw(roofline.read_points(files)))


def _timeline(arguments: argparse.Namespace) -> int:
    from src.bench.plots import timeline

    figure = timeline.draw(
        timeline.read_trace(arguments.file),
        first=arguments.from_step,
        steps=arguments.steps,
        lanes=arguments.lanes,
    )
    return _write(arguments, figure)


def _write(arguments: argparse.Namespace, figure: Any) -> int:
    from src.bench.plots.canvas import write

    write(figure, arguments.output)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")
    return 0


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in _METRICS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(_METRICS)}, got {text!r}")
    return names
