"""``python -m src bench``: lists the subcommands.

Each is a module with ``add_command(commands)``. Every ``--help`` imports all of them, so they
import heavy packages (numpy, httptools, matplotlib, torch) only in their ``run``.
"""

from __future__ import annotations

from typing import Final

from src.cli.bench import (
    calibrate,
    latency,
    plot,
    prefix_cache,
    serve,
    simulate,
    soak,
    startup,
    throughput,
)
from src.cli.options import CommandModule, Commands

ABOUT: Final = "Measure an engine or a server, with vLLM's options and figures."
SUBCOMMANDS: Final[tuple[CommandModule, ...]] = (
    latency,
    throughput,
    serve,
    startup,
    prefix_cache,
    calibrate,
    simulate,
    soak,
    plot,
)


def add_command(commands: Commands) -> None:
    """Declare the command with all of its subcommands."""
    parser = commands.add_parser("bench", help=ABOUT, description=ABOUT)
    kinds = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    for module in SUBCOMMANDS:
        module.add_command(kinds)
