"""End to end: latency of one stream, throughput of many, in process and over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import configuration, parse, vocab_size_of
from benchmarks.load import (
    Answer,
    Client,
    engine_client,
    http_client,
    one_by_one,
    random_prompts,
    side_by_side,
    throughput,
)
from benchmarks.reported import REPORTED, report
from benchmarks.serving import ready_server
from benchmarks.shapes import write_checkpoint
from src import AsyncEngine, Config
from src.core.settings import CHECKOUT
from src.ops.build.kernels import ensure_built

_INPUT_LEN, _OUTPUT_LEN, _STREAMS, _REQUESTS, _REPEATS = 128, 64, 32, 64, 3

pytestmark = pytest.mark.benchmark(timer=REPORTED)


class Seen:
    """All measurements of one client: single requests, and concurrent runs."""

    def __init__(self, config: Config, lone: list[Answer], runs: list[dict[str, float]]) -> None:
        self.config = config
        self.lone = lone
        self.runs = runs


async def measured(client: Client, config: Config) -> Seen:
    """Measure a client; different seeds keep prompts out of the prefix cache."""
    vocab_size = vocab_size_of(config)
    warm_up = random_prompts(_STREAMS, _INPUT_LEN, vocab_size, seed=1)
    await side_by_side(client, warm_up, 16, _STREAMS)
    prompts = random_prompts(2 * _REPEATS, _INPUT_LEN, vocab_size, seed=2)
    lone = await one_by_one(client, prompts, _OUTPUT_LEN)
    runs = []
    for repeat in range(_REPEATS):
        prompts = random_prompts(_REQUESTS, _INPUT_LEN, vocab_size, seed=3 + repeat)
        answers = await side_by_side(client, prompts, _OUTPUT_LEN, _STREAMS)
        runs.append(throughput(answers, _INPUT_LEN))
    return Seen(config, lone, runs)


async def in_process(config: Config) -> Seen:
    ensure_built(wait=True)
    async with AsyncEngine.open(config) as engine:
        return await measured(engine_client(engine), config)


async def over_http(url: str, config: Config) -> Seen:
    async with http_client(url) as client:
        return await measured(client, config)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """The demo model both in process and over HTTP, and a model of 7 M parameters."""
    demo = configuration(parse(["--config", str(CHECKOUT / "configs" / "demo.toml")]))
    found = asyncio.run(in_process(demo))
    with ready_server(demo) as server:
        served = asyncio.run(over_http(server.url, demo))
    checkpoint: Path = write_checkpoint(tmp_path_factory.mktemp("dummy"), "7m")
    dummy = configuration(parse(["--model", str(checkpoint), "--dummy"]))
    small = asyncio.run(in_process(dummy))
    return {"demo, in process": found, "demo, http": served, "7m, in process": small}


CASES = ("demo, in process", "demo, http", "7m, in process")


def describe(benchmark: Any, group: str, case: str, seen: Seen) -> None:
    benchmark.group = group
    benchmark.extra_info |= {
        "case": case,
        "input_len": _INPUT_LEN,
        "output_len": _OUTPUT_LEN,
        "config": seen.config,
    }


@pytest.mark.parametrize("case", CASES)
def test_time_to_first_token(benchmark: Any, case: str, seen: dict[str, Seen]) -> None:
    describe(benchmark, "one stream, time to first token", case, seen[case])
    report(benchmark, [answer.ttft for answer in seen[case].lone])


@pytest.mark.parametrize("case", CASES)
def test_time_per_output_token(benchmark: Any, case: str, seen: dict[str, Seen]) -> None:
    describe(benchmark, "one stream, time per output token", case, seen[case])
    report(benchmark, [answer.tpot for answer in seen[case].lone])


@pytest.mark.parametrize("case", CASES)
def test_throughput(benchmark: Any, case: str, seen: dict[str, Seen]) -> None:
    """Wall-clock time per token, so that less is better here too."""
    describe(benchmark, f"{_STREAMS} streams, time per token of all", case, seen[case])
    runs = seen[case].runs
    report(benchmark, [1 / run["output_throughput"] for run in runs])
    benchmark.extra_info |= {
        "requests": _REQUESTS,
        "concurrency": _STREAMS,
        "tok/s": 1 / benchmark.stats.stats.median,
    }
