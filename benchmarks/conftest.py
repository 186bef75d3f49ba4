"""Runs `python -m pytest benchmarks --benchmark-only`; the test suite skips benchmarks.

Everything that pytest-benchmark saves (`--benchmark-autosave`, `--benchmark-save`,
`--benchmark-json`) is also appended to `results/suites.jsonl`, one line per benchmark.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from benchmarks.record import Figure, Recorder, portable
from src import Config
from src.engine.sizing.roofline import Roofline, measure

_NAME = "suites"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # The project's options skip benchmarks; undo that if only benchmarks were requested.
    if config.option.benchmark_only:
        config.option.benchmark_skip = False
        # Before any measurement, so that the recorded load is not the benchmarks' own.
        config.stash[_RECORDER] = Recorder(_NAME, command="nox -s bench", prints=False)


_RECORDER = pytest.StashKey[Recorder]()


def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]
) -> None:
    """Before pytest-benchmark writes its file, add our lines, and the engine's configuration."""
    recorder = config.stash.get(_RECORDER, None)
    for saved in output_json["benchmarks"]:
        extra = saved["extra_info"]
        engine_config = extra.get("config")
        if isinstance(engine_config, Config):
            extra["config"] = portable(msgspec.to_builtins(engine_config))
        if recorder is not None:
            add_line(recorder, saved, engine_config)


def add_line(recorder: Recorder, saved: dict[str, Any], engine_config: Config | None) -> None:
    """Convert one benchmark of pytest-benchmark's JSON into one of our lines."""
    stats = saved["stats"]
    figure = Figure("s", stats["median"], stats["min"], stats["max"], stats["rounds"])
    details = {name: value for name, value in saved["extra_info"].items() if name != "config"}
    recorder.add(
        saved["fullname"].removeprefix("benchmarks/"),
        {"seconds": figure},
        config=engine_config,
        group=saved["group"],
        iqr=stats["iqr"],
        **details,
    )


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Measure per core: on a shared machine, two cores are rarely available at once."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def roofline(one_thread: None) -> Roofline:
    """The limits with the faster dtype: without native support, narrow numbers are widened."""
    wide = measure(torch.device("cpu"), torch.float32)
    narrow = measure(torch.device("cpu"), torch.bfloat16)
    return Roofline(max(wide.bandwidth, narrow.bandwidth), max(wide.flops, narrow.flops))
