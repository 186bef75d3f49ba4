"""``python -m src bench startup``: how long a server takes to start, cold and warm."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from src.cli.bench.dataset_options import natural
from src.cli.bench.result_options import percentile_map, write_json
from src.cli.options import Commands, config_of
from src.cli.options import add_command as add
from src.core.errors import ConfigError
from src.core.start_timeline import timeline_lines

if TYPE_CHECKING:
    from src.bench.startup import Startup

ABOUT: Final = "How long a server takes to start: with an empty cache of artifacts, and a full one."
_PERCENTS: Final = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
# Field of a start -> its printed name; fields are also names in result files.
_METRICS: Final = {
    "startup": ("ready", "startup time"),
    "first_token": ("first_token", "time to the first token"),
    "kernels": ("kernels", "time to the kernels of this CPU"),
    "compiled": ("compiled", "time to compiled code"),
    "compilation": ("compilation", "compilation time"),
}


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(commands, "startup", ABOUT, run)
    for name, default, about in (
        ("--num-iters-cold", 3, "starts with an empty cache"),
        ("--num-iters-warmup", 1, "starts that fill a cache and are not counted"),
        ("--num-iters-warm", 3, "starts with that cache"),
    ):
        parser.add_argument(
            name, type=natural, default=default, metavar="N", help=f"{about} (default: {default})"
        )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="where figures are kept")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from src.bench.server_process import left_by_signals
    from src.bench.startup import cold_start, warm_starts

    config = config_of(arguments)
    if arguments.num_iters_warm and not arguments.num_iters_warmup:
        raise ConfigError("warm starts need a start that fills the cache: --num-iters-warmup 1")
    with left_by_signals():
        found = {"cold": _starts(lambda: cold_start(config), arguments.num_iters_cold, arguments)}
        if arguments.num_iters_warm:
            with warm_starts(config) as start:
                count = arguments.num_iters_warmup + arguments.num_iters_warm
                found["warm"] = _starts(start, count, arguments)[arguments.num_iters_warmup :]
    result: dict[str, Any] = {}
    print("=" * 60)
    print("STARTUP TIME BENCHMARK RESULTS")
    print("=" * 60)
    for name, startups in found.items():
        if startups:
            result |= _report(name, startups)
    if arguments.output_json is not None:
        from src.bench.environment import environment

        write_json(arguments.output_json, {**result, "environment": environment()})
    return 0


def _starts(
    start: Callable[[], Startup], count: int, arguments: argparse.Namespace
) -> list[Startup]:
    from tqdm import tqdm

    return [start() for _ in tqdm(range(count), disable=arguments.disable_tqdm, unit=" starts")]


def _report(name: str, startups: Sequence[Startup]) -> dict[str, Any]:
    """Print the metrics of the starts of one kind; returns them under vLLM's names."""
    from src.bench.figures import summarize
    from src.bench.startup import spans_of

    result: dict[str, Any] = {}
    print(f"\n{name.upper()} STARTUP ({len(startups)}):")
    for metric, (field, label) in _METRICS.items():
        values = [getattr(startup, field) for startup in startups]
        seconds = [value for value in values if value is not None]
        if not seconds:
            continue
        found = summarize(seconds, _PERCENTS)
        print(f"Avg {label}: {found.mean:.2f} seconds")
        if len(seconds) > 1:
            percents = (
                f"{percent:g}%: {value:.2f}" for percent, value in found.percentiles.items()
            )
            print(f"  {'  '.join(percents)}")
        result[f"avg_{name}_{metric}_time"] = found.mean
        result[f"{name}_{metric}_times"] = seconds
        result[f"{name}_{metric}_percentiles"] = percentile_map(found)
    result[f"{name}_phases"] = [startup.phases for startup in startups]
    result[f"{name}_phases_began"] = [startup.began for startup in startups]
    print("Timeline of the last one:")
    print("\n".join(timeline_lines(spans_of(startups[-1]))))
    return result
