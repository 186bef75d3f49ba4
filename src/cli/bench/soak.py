"""``python -m src bench soak``: a stress test with everything that clients may do."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from src.cli.bench.dataset_options import positive
from src.cli.options import Commands, config_of
from src.cli.options import add_command as add
from src.core.errors import ConfigError

if TYPE_CHECKING:
    from src.bench.soak.soak import SoakReport
    from src.bench.soak.vitals import Vitals

EXIT_FAILED: Final = 1
_MIB: Final = 2**20


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(
        commands,
        "soak",
        "Start a server and do to it what clients do: fails on a leak, a hang or a wrong answer.",
        run,
    )
    parser.add_argument(
        "--duration", type=float, default=60.0, metavar="S", help="seconds of load (default: 60)"
    )
    parser.add_argument(
        "--concurrency", type=positive, default=24, metavar="N",
        help="clients at once, beside bursts (default: 24)",
    )  # fmt: skip
    parser.add_argument(
        "--patience", type=float, default=60.0, metavar="S",
        help="seconds after which a client calls it a hang (default: 60)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="the whole report")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from src.bench.server_process import left_by_signals
    from src.bench.soak.server import hurt, soaked_server
    from src.bench.soak.soak import Soak

    if not arguments.duration > 0 or not arguments.patience > 0:
        raise ConfigError("--duration and --patience must be over 0")
    with left_by_signals(), soaked_server(hurt(config_of(arguments))) as server:
        soak = Soak(
            server,
            seconds=arguments.duration,
            concurrency=arguments.concurrency,
            patience=arguments.patience,
            seed=arguments.seed,
        )
        print(_HEADING, file=sys.stderr)
        report = asyncio.run(soak.run(_tell))
    print("\n".join(report_lines(report)))
    if arguments.output_json is not None:
        _write(arguments.output_json, report)
    return EXIT_FAILED if report.num_failures else 0


_HEADING: Final = (
    f"{'seconds':>8}{'requests':>10}{'tasks':>7}{'threads':>9}{'files':>7}{'MiB':>9}{'series':>8}"
)


def _tell(reading: Vitals) -> None:
    print(
        f"{reading.at:>8.1f}{reading.requests:>10}{reading.tasks:>7}{reading.threads:>9}"
        f"{reading.descriptors:>7}{reading.memory / _MIB:>9.1f}{reading.series:>8}",
        file=sys.stderr,
    )


def report_lines(report: SoakReport) -> list[str]:
    """The report as text."""
    from src.bench.soak.vitals import memory_growth

    total = sum(sum(counts.values()) for counts in report.outcomes.values())
    lines = [f"{total} acts of clients in {report.seconds:.1f} s"]
    for kind, counts in report.outcomes.items():
        said = ", ".join(f"{outcome} {count}" for outcome, count in sorted(counts.items()))
        lines.append(f"  {kind:<24}{said}")
    growth = memory_growth(report.readings)
    if growth is not None:
        lines.append(f"memory along its slope: {growth / _MIB:+.1f} MiB")
    if report.num_failures:
        lines += [f"FAILED: {report.num_failures} failures", *report.failures]
    else:
        lines.append("held: no leak, no hang, no wrong answer")
    return lines


def _write(path: Path, report: SoakReport) -> None:
    from src.bench.errors import BenchError

    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from error
