"""The event loop's CPU time per streamed token, layer by layer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.loop_time import LAYERS, Layers, parse, served
from benchmarks.reported import REPORTED, report
from src.core.settings import CHECKOUT

_STREAMS, _OUTPUT_LEN = 128, 128
_ROUNDS = 3


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def layers(runner: asyncio.Runner) -> Iterator[Layers]:
    config = str(CHECKOUT / "configs" / "demo.toml")
    options = parse(
        [
            *("--config", config, "--streams", str(_STREAMS)),
            *("--output-len", str(_OUTPUT_LEN)),
        ]
    )
    opened = served(options)
    yield runner.run(opened.__aenter__())
    runner.run(opened.__aexit__(None, None, None))


@pytest.mark.benchmark(timer=REPORTED)
@pytest.mark.parametrize("layer", LAYERS)
def test_loop_time_per_token(
    benchmark: Any, layer: str, layers: Layers, runner: asyncio.Runner
) -> None:
    """Includes the layers below, but not the device's steps, which run in another thread."""

    async def turn() -> float:
        started = time.thread_time()
        await layers.turns[layer]()
        return time.thread_time() - started

    runner.run(turn())
    num_tokens = _STREAMS * _OUTPUT_LEN
    benchmark.group = "loop time per streamed token"
    benchmark.extra_info |= {
        "case": layer,
        "streams": _STREAMS,
        "output_len": _OUTPUT_LEN,
        "config": layers.config,
    }
    report(benchmark, [runner.run(turn()) / num_tokens for _ in range(_ROUNDS)])
