"""Latency, throughput and start-up of the engine on a real model.

    python -m benchmarks.engine                      # the demo model, in process
    python -m benchmarks.engine --http               # and through hypercorn on a real socket
    python -m benchmarks.engine --startup            # and cold and warm starts
    python -m benchmarks.engine --model DIR --dummy  # any config.json, weights from a seed

A short table goes to the terminal, one JSON line per measurement to results/engine.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec

from benchmarks.load import (
    LATENCY,
    THROUGHPUT,
    Client,
    engine_client,
    http_client,
    latency,
    one_by_one,
    random_prompts,
    side_by_side,
    throughput,
)
from benchmarks.record import Figure, Recorder, add_common, figures_of
from benchmarks.startup import STARTUP, measure
from src import AsyncEngine, Config
from src.bench.server_process import environment_of
from src.core.settings import CHECKOUT, load_config

_HOST = "127.0.0.1"
_START_SECONDS = 600.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/demo.toml", metavar="FILE")
    parser.add_argument("--model", metavar="PATH", help="checkpoint, instead of the file's")
    parser.add_argument(
        "--dummy", action="store_true", help="weights from a seed: config.json only"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides"
    )
    parser.add_argument("--requests", type=int, default=128, metavar="N")
    parser.add_argument("--concurrency", type=int, default=32, metavar="C")
    parser.add_argument("--input-len", type=int, default=128, metavar="I", help="tokens")
    parser.add_argument("--output-len", type=int, default=128, metavar="O", help="tokens")
    parser.add_argument("--http", action="store_true", help="also over HTTP, through hypercorn")
    parser.add_argument("--startup", action="store_true", help="also cold and warm starts")
    add_common(parser, repeats=5)
    return parser.parse_args(arguments)


def configuration(options: argparse.Namespace) -> Config:
    """What is measured: compiled code from the first request on, unless told otherwise."""
    overrides = [("compile.startup", "wait")]
    if options.model is not None:
        overrides.append(("model.path", options.model))
    if options.dummy:
        overrides.append(("model.load_format", "dummy"))
    for assignment in options.overrides:
        name, _, value = assignment.partition("=")
        overrides.append((name, value))
    return load_config(options.config, overrides=overrides)


async def measure_client(
    recorder: Recorder, name: str, client: Client, vocab_size: int, about: dict[str, Any],
    options: argparse.Namespace, config: Config,
) -> None:  # fmt: skip
    """Latency of one stream at a time, then throughput of many at once."""
    input_len, output_len = options.input_len, options.output_len
    # Seeds differ, so that no measurement finds its prompts in the prefix cache.
    warm_up = random_prompts(options.concurrency, input_len, vocab_size, seed=1)
    await side_by_side(client, warm_up, min(16, output_len), options.concurrency)
    shape = {"input_len": input_len, "output_len": output_len, **about}

    prompts = random_prompts(options.repeats, input_len, vocab_size, seed=2)
    answers = await one_by_one(client, prompts, output_len)
    figures = figures_of(LATENCY, latency(answers))
    recorder.add(f"{name}, one stream", figures, config=config, **shape)

    runs = []
    for repeat in range(options.repeats):
        prompts = random_prompts(options.requests, input_len, vocab_size, seed=3 + repeat)
        answers = await side_by_side(client, prompts, output_len, options.concurrency)
        runs.append(throughput(answers, input_len))
    recorder.add(
        f"{name}, {options.concurrency} streams",
        figures_of(THROUGHPUT, runs),
        config=config,
        requests=options.requests,
        concurrency=options.concurrency,
        **shape,
    )


async def measure_engine(recorder: Recorder, config: Config, options: argparse.Namespace) -> int:
    """In this process; returns the vocabulary's size."""
    from src.ops.cpu.build import ensure_built

    kernels = ensure_built(wait=True)
    async with AsyncEngine.open(config) as engine:
        info = engine.model_info
        about = {
            "kernels": kernels,
            "compiled": engine.stats.compiled,
            "dtype": info.dtype,
            "max_model_len": info.max_model_len,
        }
        await measure_client(
            recorder, "engine", engine_client(engine), info.vocab_size, about, options, config
        )
        bubble = {"bubble": Figure.of("", [engine.stats.bubble])}
        recorder.add("engine, device waited for the host", bubble, config=config)
        return info.vocab_size


@contextlib.contextmanager
def server(config: Config) -> Iterator[int]:
    """Hypercorn as a user starts it, ready, on a free port. Blocks until it is."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "hypercorn", "--config", "configs/hypercorn.toml"]
    process = subprocess.Popen(
        [*command, "--bind", f"{_HOST}:{port}", "src.http:app"],
        cwd=CHECKOUT,
        env=environment_of(config, SLIPSTREAM_OBSERVABILITY__STATS_INTERVAL="0"),
    )
    try:
        _wait_ready(process, port)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in _until(_START_SECONDS):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"http://{_HOST}:{port}/ready", timeout=5)
            return
    raise RuntimeError(f"the server was not ready after {_START_SECONDS:g} s")


def _until(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.1)


async def run(options: argparse.Namespace) -> None:
    config = configuration(options)
    recorder = Recorder("engine", save=not options.no_save)
    vocab_size = await measure_engine(recorder, config, options)
    if options.http:
        with server(config) as port:
            client = http_client(_HOST, port)
            await measure_client(recorder, "http", client, vocab_size, {}, options, config)
    if options.startup:
        # As it is served: ready at once, compiled code swapped in later.
        compile_section = msgspec.structs.replace(config.compile, startup="background")
        started = msgspec.structs.replace(config, compile=compile_section)
        for name, cold in (("cold", True), ("warm", False)):
            repeats = await asyncio.to_thread(
                measure, started, cold=cold, repeats=1 if cold else options.repeats
            )
            recorder.add(f"start, {name}", figures_of(STARTUP, repeats), config=started)


def main() -> None:
    asyncio.run(run(parse()))


if __name__ == "__main__":
    main()
