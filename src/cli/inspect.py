"""``python -m src inspect``: saves and summarises a server's timeline, or replays a plan log."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Final

from src.cli.debug_client import add_server, client_of
from src.cli.options import Commands
from src.cli.options import add_command as add
from src.core.errors import SlipstreamError
from src.core.views import TimelineView
from src.observability.timeline_figures import summary
from src.observability.trace_events import trace_events

EXIT_DIFFERS: Final = 1
DEFAULT_OUTPUT: Final = "slipstream-timeline.json"


class InspectError(SlipstreamError):
    """A file cannot be read or written."""


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(
        commands,
        "inspect",
        "Save a server's last steps as a trace for ui.perfetto.dev and sum them up, or replay a "
        "plan log without a model.",
        run,
    )
    add_server(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        default=DEFAULT_OUTPUT,
        help=f"where the trace goes (default: {DEFAULT_OUTPUT})",
    )
    parser.add_argument(
        "--steps", metavar="N", type=_count, help="the newest N steps (default: all that are kept)"
    )
    parser.add_argument(
        "--replay",
        metavar="PLANS",
        help="replay this log of observability.plan_log; exit code 1 when a plan differs",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.replay is not None:
        return _replay(Path(arguments.replay))
    newest = "" if arguments.steps is None else f"&steps={arguments.steps}"
    with contextlib.closing(client_of(arguments)) as client:
        view = client.decode(f"/debug/timeline?format=records{newest}", TimelineView)
    output = Path(arguments.output)
    try:
        output.write_bytes(trace_events(view))
    except OSError as error:
        raise InspectError(f"{output}: cannot be written: {error.strerror}") from error
    print("\n".join(summary(view)))
    print(f"\n{output}: open it at https://ui.perfetto.dev, which keeps it in the browser")
    return 0


def _replay(log: Path) -> int:
    from src.engine.scheduling.replay import ReplayError, read_lines, replay

    try:
        with log.open("rb") as lines:
            report = replay(read_lines(lines))
    except OSError as error:
        raise InspectError(f"{log}: cannot be read: {error.strerror}") from error
    except ReplayError as error:
        raise InspectError(f"{log}: {error}") from error
    stats = report.stats
    print(
        f"{report.num_plans} plans of {report.num_lines} lines replayed: "
        f"{stats.admissions} admissions, {stats.preemptions} preemptions, "
        f"{stats.prefix_cache_hits} of {stats.prefix_cache_queries} tokens cached"
    )
    if report.cut is not None:
        print(f"the log ends before its engine did: {report.cut}")
    if report.difference is None:
        print("every plan is the recorded one")
        return 0
    print(f"line {report.difference.line} differs")
    print(f"  recorded  {report.difference.recorded}")
    print(f"  replayed  {report.difference.replayed}")
    return EXIT_DIFFERS


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a number over 0, got {text!r}")
    return int(text)
