"""Options for the report of a run and for its result file."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from src.core.errors import ConfigError

if TYPE_CHECKING:
    from src.bench.answers import Answer
    from src.bench.figures import Summary
    from src.bench.metrics import Metrics

_DEFAULT_METRICS: Final = "ttft,tpot,itl,e2el"
_DEFAULT_PERCENTILES: Final = "90,99"


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of a report."""
    group = parser.add_argument_group("report")
    group.add_argument(
        "--percentile-metrics", type=_metric_names, default=_DEFAULT_METRICS, metavar="NAMES",
        help="of ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue "
        f"(default: {_DEFAULT_METRICS})",
    )  # fmt: skip
    group.add_argument(
        "--metric-percentiles", type=_percents, default=_DEFAULT_PERCENTILES, metavar="P",
        help=f"0 to 100, with commas between them (default: {_DEFAULT_PERCENTILES})",
    )  # fmt: skip
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS",
        help="what a good request does not exceed, e.g. ttft:200 tpot:50 e2el:5000",
    )  # fmt: skip
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add the options of a result file."""
    group = parser.add_argument_group("result file")
    group.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    group.add_argument(
        "--append-result", action="store_true", help="the same, as one more line of its file"
    )
    group.add_argument(
        "--save-detailed", action="store_true", help="with figures and text of each request"
    )
    group.add_argument("--result-dir", type=Path, metavar="DIRECTORY")
    group.add_argument("--result-filename", metavar="NAME")
    group.add_argument("--label", help="of the run, and the beginning of the file's name")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")


def metrics_of(
    arguments: argparse.Namespace, answers: Sequence[Answer], duration: float
) -> Metrics:
    """The metrics that the options ask for.

    Raises
    ------
    ConfigError
        An objective is invalid.
    """
    from src.bench.metrics import measure, parse_objectives

    return measure(
        answers,
        duration,
        percents=arguments.metric_percentiles,
        objectives=parse_objectives(arguments.goodput),
    )


def save_result(
    arguments: argparse.Namespace, model: str, tokenizer: str | None, fields: Mapping[str, Any]
) -> None:
    """Write a result file with vLLM's field names, if the options ask for one.

    Raises
    ------
    ConfigError
        It cannot be written, or the metadata are not ``KEY=VALUE`` pairs.
    """
    metadata = pairs_of("--metadata", arguments.metadata)
    if not (arguments.save_result or arguments.append_result):
        return
    from src.bench.environment import environment
    from src.bench.report import DETAILS

    date = time.strftime("%Y%m%d-%H%M%S")
    kept = {
        name: value
        for name, value in fields.items()
        if arguments.save_detailed or name not in DETAILS
    }
    result = {
        "date": date,
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": arguments.num_prompts,
        **metadata,
        **kept,
        "environment": environment(),
    }
    name = arguments.result_filename or _file_name(arguments, model, date)
    file = (arguments.result_dir or Path()) / name
    mode = "a" if arguments.append_result else "w"
    write_json(file, result, mode=mode)
    print(f"{file}: written")


def write_json(file: Path, result: Mapping[str, Any], *, mode: str = "w") -> None:
    """Write one line of JSON.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open(mode, encoding="utf-8") as stream:
            # What is no number is null: not every reader of JSON takes NaN for it.
            stream.write(msgspec.json.encode(result).decode() + "\n")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None


def percentile_map(summary: Summary) -> dict[str, float]:
    """Percentiles in the form of result files."""
    return {f"{percent:g}": value for percent, value in summary.percentiles.items()}


def pairs_of(option: str, items: Sequence[str]) -> dict[str, str]:
    """Parse ``KEY=VALUE`` items.

    Raises
    ------
    ConfigError
        An item has another form.
    """
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{option}: expected KEY=VALUE, got {item!r}")
        found[key.strip()] = value.strip()
    return found


def _file_name(arguments: argparse.Namespace, model: str, date: str) -> str:
    label = arguments.label or arguments.backend
    if arguments.ramp_up_strategy is not None:
        start, end = arguments.ramp_up_start_rps, arguments.ramp_up_end_rps
        rate = f"ramp-up-{arguments.ramp_up_strategy}-{start:g}qps-{end:g}qps"
    else:
        rate = f"{arguments.request_rate:g}qps"
    limit = arguments.max_concurrency
    concurrency = "" if limit is None else f"-concurrency{limit}"
    return f"{label}-{rate}{concurrency}-{model.rstrip('/').rpartition('/')[2]}-{date}.json"


def _metric_names(text: str) -> list[str]:
    from src.bench.report import METRICS

    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"expected names of {', '.join(METRICS)}, got {unknown[0]!r}"
        )
    return names


def _percents(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(0 <= percent <= 100 for percent in found):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 100, got {text!r}")
    return found
