"""Time from process start to the first token, cold and warm."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from benchmarks.reported import REPORTED, report
from benchmarks.startup import STARTUP, measure
from src import Config
from src.core.settings import CHECKOUT, load_config

_WARM_REPEATS = 3
# "cold" or "warm" -> seconds of each of STARTUP, per start
Starts = dict[str, list[dict[str, float]]]


@pytest.fixture(scope="module")
def config() -> Config:
    """As it serves: ready at once, compiled code takes over later (`compiled`)."""
    return load_config(CHECKOUT / "configs" / "demo.toml")


@pytest.fixture(scope="module")
def starts(config: Config) -> Starts:
    return measure(config, cold_repeats=1, warm_repeats=_WARM_REPEATS)


@pytest.mark.benchmark(timer=REPORTED)
@pytest.mark.parametrize("case", ["cold", "warm"])
def test_first_token_after_start(benchmark: Any, case: str, config: Config, starts: Starts) -> None:
    benchmark.group = "start to first token"
    benchmark.extra_info |= {"case": case, "config": config}
    report(benchmark, [start["first_token"] for start in starts[case]])
    benchmark.extra_info |= {
        f"{name} s": statistics.median(start[name] for start in starts[case]) for name in STARTUP
    }
