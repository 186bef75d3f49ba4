"""``python -m src bench simulate``: tries loads and policies on the scheduler without a device."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from tqdm import tqdm

from src.cli.bench.calibrate import DEFAULT_OUTPUT
from src.cli.bench.dataset_options import positive
from src.cli.options import Commands
from src.core.cpus import usable_cpus
from src.core.errors import ConfigError

if TYPE_CHECKING:
    from src.bench.simulate.outcome import Outcome
    from src.bench.simulate.requests import TextWorkload
    from src.bench.simulate.study import Load, Setup, Study

ABOUT: Final = "Simulate a load on the scheduler, with step costs of `bench calibrate`."
_MS: Final = 1000.0
# (heading, value) of each column.
_COLUMNS: Final = (
    ("req/s", lambda o: f"{o.request_throughput:.2f}"),
    ("good/s", lambda o: "-" if o.request_goodput is None else f"{o.request_goodput:.2f}"),
    ("out tok/s", lambda o: f"{o.output_throughput:.0f}"),
    ("TTFT p50", lambda o: f"{_MS * o.ttft.median:.0f}"),
    ("p99", lambda o: f"{_MS * o.ttft.percentiles[99]:.0f}"),
    ("TPOT p50", lambda o: f"{_MS * o.tpot.median:.1f}"),
    ("p99", lambda o: f"{_MS * o.tpot.percentiles[99]:.1f}"),
    ("busy", lambda o: f"{100 * o.device_busy:.0f} %"),
    ("preempted", lambda o: str(o.scheduler.preemptions)),
    ("cached", lambda o: f"{100 * _hits(o):.0f} %"),
    ("refused", lambda o: str(o.refused)),
)  # fmt: skip
# Those of texts that become vectors, where the load has some.
_TEXT_COLUMNS: Final = (
    ("texts/s", lambda o: f"{o.embedded_per_second:.1f}"),
    ("text p50", lambda o: f"{_MS * o.embed_e2el.median:.0f}"),
    ("p99", lambda o: f"{_MS * o.embed_e2el.percentiles[99]:.0f}"),
)


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser: argparse.ArgumentParser = commands.add_parser("simulate", help=ABOUT, description=ABOUT)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--calibration", type=Path, default=Path(DEFAULT_OUTPUT), metavar="FILE",
        help=f"file of `bench calibrate` (default: {DEFAULT_OUTPUT})",
    )  # fmt: skip
    _add_load(parser)
    study = parser.add_argument_group("study")
    study.add_argument(
        "--vary", action="append", default=[], type=_variation, metavar="NAME=VALUE[,VALUE...]",
        help="run once per value: request_rate, replicas, routing (round-robin, least-requests), "
        "pipeline_depth, or a limit of the scheduler such as max_num_seqs, "
        "max_num_batched_tokens, num_blocks, policy; may be repeated",
    )  # fmt: skip
    study.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS",
        help="what a good request does not exceed, e.g. ttft:500 tpot:50",
    )  # fmt: skip
    study.add_argument(
        "--find-rate", type=float, metavar="PERCENT",
        help="search the greatest request rate at which so many percent are good",
    )  # fmt: skip
    study.add_argument(
        "--no-scatter", action="store_true", help="steps take what they do on average"
    )
    study.add_argument(
        "--jobs", type=positive, default=usable_cpus(), metavar="N",
        help="processes for several runs (default: one per CPU)",
    )  # fmt: skip
    study.add_argument("--output-json", type=Path, metavar="FILE", help="all figures of all runs")


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--num-prompts", type=_at_least_none, default=1000, metavar="N",
        help="that ask for text (default: 1000)",
    )  # fmt: skip
    load.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R",
        help="per second; by default all at once, and a trace's as they came",
    )  # fmt: skip
    load.add_argument("--burstiness", type=float, default=1.0, metavar="B")
    for name, default, about in (
        ("--random-input-len", 1024, "of a prompt"),
        ("--random-output-len", 128, "of an output"),
        ("--random-prefix-len", 0, "of a prefix in front of it"),
    ):
        load.add_argument(
            name, type=int, default=default, metavar="TOKENS", help=f"{about} (default: {default})"
        )
    load.add_argument(
        "--num-prefixes", type=positive, default=1, metavar="N", help="different ones"
    )
    load.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R")
    load.add_argument(
        "--max-tokens", type=positive, metavar="TOKENS",
        help="that every request asks for, though it ends sooner (default: its output)",
    )  # fmt: skip
    load.add_argument(
        "--priorities",
        type=positive,
        default=1,
        metavar="N",
        help="classes of requests (default: 1)",
    )
    load.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="a recorded trace, as bench serve's"
    )
    load.add_argument("--timed-trace-chunk-hash-size", type=positive, default=16, metavar="TOKENS")
    load.add_argument("--timed-trace-sec-multiplier", type=float, default=1.0, metavar="S")
    texts = parser.add_argument_group("texts to embed beside it")
    texts.add_argument("--num-texts", type=_at_least_none, default=0, metavar="N")
    texts.add_argument(
        "--text-rate", type=float, default=math.inf, metavar="R",
        help="per second (default: all at once)",
    )  # fmt: skip
    texts.add_argument(
        "--text-len", type=positive, default=128, metavar="TOKENS",
        help="of a text, within --random-range-ratio (default: 128)",
    )  # fmt: skip
    texts.add_argument(
        "--text-pooling", choices=("last", "mean", "first", "all"), default="last",
        help="how hidden states become a vector (default: last)",
    )  # fmt: skip
    texts.add_argument(
        "--text-priority", type=int, default=0, metavar="N",
        help="of texts under the policy priority (default: 0)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from src.bench.metrics import parse_objectives
    from src.bench.simulate.calibration import load
    from src.bench.simulate.study import Setup, Study, setups_of

    calibration = load(arguments.calibration)
    study = Study(
        calibration=calibration,
        load=_load(arguments),
        seed=None if arguments.no_scatter else arguments.seed,
        objectives=parse_objectives(arguments.goodput),
    )
    base = Setup(
        limits=calibration.limits,
        pipeline_depth=calibration.pipeline_depth,
        request_rate=arguments.request_rate,
    )
    setups = setups_of(base, arguments.vary)
    rows = [
        (changes, outcome)
        for (changes, _), outcome in zip(setups, _outcomes(arguments, study, setups), strict=True)
    ]
    print("\n".join(table(rows)))
    if arguments.output_json is not None:
        _write(arguments.output_json, rows)
    return 0


def table(rows: list[tuple[dict[str, str], Outcome]]) -> list[str]:
    """A line per run: its varied values, and its metrics; times are milliseconds."""
    names = list(rows[0][0])
    has_texts = any(outcome.embedded for _, outcome in rows)
    columns = (*_COLUMNS, *_TEXT_COLUMNS) if has_texts else _COLUMNS
    cells = [[*names, *(heading for heading, _ in columns)]]
    cells += [
        [*changes.values(), *(value(outcome) for _, value in columns)] for changes, outcome in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]


def _load(arguments: argparse.Namespace) -> Load:
    from src.bench.dataset_files import read_trace
    from src.bench.simulate.requests import RandomWorkload
    from src.bench.simulate.study import Load

    ratio = arguments.random_range_ratio
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {ratio}")

    def span(length: int) -> tuple[int, int]:
        return math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))

    count = arguments.num_prompts
    return Load(
        workload=RandomWorkload(
            count=count,
            input_len=span(arguments.random_input_len),
            output_len=span(arguments.random_output_len),
            prefix_len=arguments.random_prefix_len,
            num_prefixes=arguments.num_prefixes,
            max_tokens=arguments.max_tokens,
            priorities=arguments.priorities,
            seed=arguments.seed,
        ),
        trace=None if arguments.trace is None else read_trace(arguments.trace, count),
        unit=arguments.timed_trace_sec_multiplier,
        chunk=arguments.timed_trace_chunk_hash_size,
        burstiness=arguments.burstiness,
        texts=_texts(arguments, span(arguments.text_len)),
        text_rate=arguments.text_rate,
    )


def _texts(arguments: argparse.Namespace, lengths: tuple[int, int]) -> TextWorkload | None:
    from src.bench.simulate.requests import TextWorkload

    if not arguments.num_texts:
        return None
    return TextWorkload(
        count=arguments.num_texts,
        input_len=(max(1, lengths[0]), lengths[1]),
        pooling=arguments.text_pooling,
        priority=arguments.text_priority,
        seed=arguments.seed + 1,
    )


def _outcomes(
    arguments: argparse.Namespace, study: Study, setups: list[tuple[dict[str, str], Setup]]
) -> list[Outcome]:
    if arguments.find_rate is not None:
        found = []
        for changes, setup in setups:
            rate, outcome = study.greatest_rate(setup, arguments.find_rate / 100)
            changes["found request_rate"] = f"{rate:.2f}"
            found.append(outcome)
        return found
    if len(setups) > 1:
        runs = study.run_all([setup for _, setup in setups], arguments.jobs)
        return list(tqdm(runs, total=len(setups), unit=" runs", file=sys.stderr))
    trace = study.load.trace
    count = study.load.workload.count if trace is None else len(trace)
    count += arguments.num_texts
    with tqdm(total=count, unit=" requests", file=sys.stderr, mininterval=1.0) as bar:
        return [study.run(setups[0][1], lambda count: _tell(bar, count))]


def _tell(bar: tqdm[Any], count: int) -> None:
    bar.update(count)


def _write(path: Path, rows: list[tuple[dict[str, str], Outcome]]) -> None:
    from src.bench.errors import BenchError

    body = [{"changes": changes, "outcome": outcome} for changes, outcome in rows]
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(body)) + b"\n")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from error


def _hits(outcome: Outcome) -> float:
    stats = outcome.scheduler
    return stats.prefix_cache_hits / max(1, stats.prefix_cache_queries)


def _at_least_none(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a number from 0 up, got {text!r}")
    return int(text)


def _variation(text: str) -> tuple[str, list[str]]:
    name, _, values = text.partition("=")
    if not name or not values:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE[,VALUE...], got {text!r}")
    return name.strip(), [value.strip() for value in values.split(",")]
