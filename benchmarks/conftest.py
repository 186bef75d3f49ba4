"""`python -m pytest benchmarks --benchmark-only` beside a test-suite that skips benchmarks.

Whatever pytest-benchmark saves (`--benchmark-autosave`, `--benchmark-save`, `--benchmark-json`) is
also added to `results/suites.jsonl`, a line per benchmark.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from benchmarks.record import Figure, Recorder, portable
from benchmarks.roofline import Roofline, measure
from src import Config

_NAME = "suites"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # The project's own options skip benchmarks, which contradicts the wish to run them alone.
    if config.option.benchmark_only:
        config.option.benchmark_skip = False
        # Before anything is measured, or the load would be the benchmarks' own.
        config.stash[_RECORDER] = Recorder(_NAME, command="nox -s bench", prints=False)


_RECORDER = pytest.StashKey[Recorder]()


def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]
) -> None:
    """Before pytest-benchmark writes its file: our lines, and an engine's configuration in both."""
    recorder = config.stash.get(_RECORDER, None)
    for saved in output_json["benchmarks"]:
        extra = saved["extra_info"]
        engine_config = extra.get("config")
        if isinstance(engine_config, Config):
            extra["config"] = portable(msgspec.to_builtins(engine_config))
        if recorder is not None:
            add_line(recorder, saved, engine_config)


def add_line(recorder: Recorder, saved: dict[str, Any], engine_config: Config | None) -> None:
    """One benchmark of pytest-benchmark's JSON as one of ours."""
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
    """Figures per core: two busy cores of a shared machine are rarely both ours."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def roofline(one_thread: None) -> Roofline:
    """Of the faster arithmetic: narrow numbers are widened where the machine cannot do them."""
    wide = measure(torch.device("cpu"), torch.float32)
    narrow = measure(torch.device("cpu"), torch.bfloat16)
    return Roofline(max(wide.bandwidth, narrow.bandwidth), max(wide.flops, narrow.flops))
