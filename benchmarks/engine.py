"""Latency and throughput of the engine on a real model, or on a shape.

    python -m benchmarks.engine                      # the demo model, in process
    python -m benchmarks.engine --http               # and through hypercorn on a real socket
    python -m benchmarks.engine --model DIR --dummy  # any config.json, weights from a seed

A server whose speed only depends on overhead; its goals are 8,000 output tokens per second and
30 ms to the first token with 32 streams:

    python -m benchmarks.engine --http-only --shape 7m --streams 32,128 --output-len 64

The server is a separate process, and this one sends the requests with the client of `python -m src
bench serve`. A short table is printed, and one JSON line per measurement goes to
results/engine.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from benchmarks.serving import metric, ready_server
from benchmarks.shapes import SHAPES, write_checkpoint
from src import AsyncEngine, Config
from src.core.settings import load_config

# KV cache for a shape, large enough that no request is preempted.
_CACHE_BYTES = 512 * 2**20
_REQUESTS_PER_STREAM = 4


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/demo.toml", metavar="FILE")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", metavar="PATH", help="checkpoint, instead of the file's")
    model.add_argument("--shape", choices=SHAPES, help="weights from a seed, instead of a model")
    parser.add_argument(
        "--dummy", action="store_true", help="weights from a seed: config.json only"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides"
    )
    parser.add_argument(
        "--requests", type=int, metavar="N", help=f"default: {_REQUESTS_PER_STREAM} per stream"
    )
    parser.add_argument(
        "--streams", type=_counts, default=(32,), metavar="C,...", help="at once, one run for each"
    )
    parser.add_argument("--input-len", type=int, default=128, metavar="I", help="tokens")
    parser.add_argument("--output-len", type=int, default=128, metavar="O", help="tokens")
    over_http = parser.add_mutually_exclusive_group()
    over_http.add_argument("--http", action="store_true", help="also over HTTP, through hypercorn")
    over_http.add_argument("--http-only", action="store_true", help="not in process")
    add_common(parser, repeats=5)
    return parser.parse_args(arguments)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(item) for item in text.split(","))
    if min(counts) < 1:
        raise ValueError(text)
    return counts


@contextlib.contextmanager
def checkpoint(options: argparse.Namespace) -> Iterator[None]:
    """Point ``--model`` to a checkpoint of ``--shape``, if given, for the duration of the block."""
    if options.shape is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder), options.shape, all_have_text=True)
        options.model, options.dummy = str(directory), True
        yield


def configuration(options: argparse.Namespace) -> Config:
    """The configuration: by default with compiled code from the first request on."""
    overrides = [("compile.startup", "wait")]
    if options.model is not None:
        overrides.append(("model.path", options.model))
    if options.dummy:
        overrides.append(("model.load_format", "dummy"))
    if options.shape is not None:
        overrides.append(("cache.memory_bytes", str(_CACHE_BYTES)))
    rows = load_config(options.config).scheduler.max_num_seqs
    overrides.append(("scheduler.max_num_seqs", str(max(rows, *options.streams))))
    for assignment in options.overrides:
        name, _, value = assignment.partition("=")
        overrides.append((name, value))
    return load_config(options.config, overrides=overrides)


def vocab_size_of(config: Config) -> int:
    """Vocabulary size of the model to be served."""
    directory = Path(config.model.path)
    if not directory.is_dir():
        # Imported here: without torch's many objects, the client's garbage collector is faster.
        from src.models.hub import resolve_model

        directory = resolve_model(config.model.path, weights=False)
    size: int = json.loads((directory / "config.json").read_text())["vocab_size"]
    return size


async def measure_client(
    recorder: Recorder, name: str, client: Client, about: dict[str, Any],
    options: argparse.Namespace, config: Config,
) -> None:  # fmt: skip
    """Measure latency with one stream at a time, then throughput with many at once."""
    input_len, output_len = options.input_len, options.output_len
    vocab_size = vocab_size_of(config)
    # Different seeds, so that no measurement finds its prompts in the prefix cache.
    warm_up = random_prompts(max(options.streams), input_len, vocab_size, seed=1)
    await side_by_side(client, warm_up, min(16, output_len), len(warm_up))
    shape = {
        "shape": options.shape,
        "input_len": input_len,
        "output_len": output_len,
        **about,
    }

    prompts = random_prompts(options.repeats, input_len, vocab_size, seed=2)
    answers = await one_by_one(client, prompts, output_len)
    figures = figures_of(LATENCY, latency(answers))
    recorder.add(f"{name}, one stream", figures, config=config, **shape)

    seed = 3
    for streams in options.streams:
        requests = options.requests or _REQUESTS_PER_STREAM * streams
        runs = []
        for _ in range(options.repeats):
            prompts = random_prompts(requests, input_len, vocab_size, seed=seed)
            answers = await side_by_side(client, prompts, output_len, streams)
            runs.append(throughput(answers, input_len))
            seed += 1
        recorder.add(
            f"{name}, {streams} streams",
            figures_of(THROUGHPUT, runs),
            config=config,
            requests=requests,
            concurrency=streams,
            **shape,
        )


async def measure_engine(recorder: Recorder, config: Config, options: argparse.Namespace) -> None:
    """Measure the engine in this process."""
    from src.ops.build.kernels import ensure_built

    kernels = ensure_built(wait=True)
    async with AsyncEngine.open(config) as engine:
        info = engine.model_info
        about = {
            "kernels": kernels,
            "compiled": engine.stats.compiled,
            "dtype": info.dtype,
            "max_model_len": info.max_model_len,
        }
        await measure_client(recorder, "engine", engine_client(engine), about, options, config)
        bubble = {"bubble": Figure.of("", [engine.stats.bubble])}
        recorder.add("engine, device waited for the host", bubble, config=config)


async def measure_server(recorder: Recorder, config: Config, options: argparse.Namespace) -> None:
    """Measure over HTTP, with the server in a separate process."""
    with ready_server(config) as server:
        about = {"compiled": metric(server, "slipstream_compiled_graphs") > 0}
        async with http_client(server.url) as client:
            await measure_client(recorder, "http", client, about, options, config)


async def run(options: argparse.Namespace) -> None:
    recorder = Recorder("engine", save=not options.no_save)
    with checkpoint(options):
        config = configuration(options)
        if not options.http_only:
            await measure_engine(recorder, config, options)
        if options.http or options.http_only:
            await measure_server(recorder, config, options)


def main() -> None:
    asyncio.run(run(parse()))


if __name__ == "__main__":
    main()
