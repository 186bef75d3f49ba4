"""``python -m src bench latency``: measures the time of one batch, in this process."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any, Final

from src.cli.bench.dataset_options import natural, positive
from src.cli.bench.result_options import percentile_map, write_json
from src.cli.loading import open_engine
from src.cli.options import Commands, config_of
from src.cli.options import add_command as add
from src.core.config import Config
from src.core.sampling_params import SamplingParams

ABOUT: Final = "How long an engine in this process takes for one batch of requests."
_PERCENTS: Final = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(commands, "latency", ABOUT, run)
    for name, default, about in (
        ("--input-len", 32, "tokens of each prompt"),
        ("--output-len", 128, "tokens of each output"),
        ("--batch-size", 8, "prompts at once"),
        ("--n", 1, "outputs of each prompt"),
        ("--num-iters", 30, "batches that are measured"),
    ):
        parser.add_argument(
            name, type=positive, default=default, metavar="N", help=f"{about} (default: {default})"
        )
    parser.add_argument(
        "--num-iters-warmup", type=natural, default=10, metavar="N",
        help="batches before them (default: 10)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="where figures are kept")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from src.bench.engine_client import measured_config, without_prefix_cache

    num_requests = arguments.batch_size * arguments.n
    # With a prefix cache, repeated prompts would cost nothing.
    config = without_prefix_cache(measured_config(config_of(arguments), num_requests=num_requests))
    latencies, ttfts, about = asyncio.run(_measure(config, arguments))
    _report(arguments, latencies, ttfts, about)
    return 0


async def _measure(
    config: Config, arguments: argparse.Namespace
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Seconds of each batch and of each first token, and facts of the engine."""
    from tqdm import tqdm

    from src.bench.engine_client import EngineClient, all_answered, engine_facts, fastest_kernels
    from src.bench.load import run_load
    from src.bench.samples import random_samples

    batch, output_len = arguments.batch_size, arguments.output_len
    async with open_engine(config) as engine:
        kernels = await fastest_kernels(engine)
        client = EngineClient(engine, SamplingParams(n=arguments.n, ignore_eos=True))
        client.check_lengths(arguments.input_len + output_len)
        samples = random_samples(
            client.codec.ids,
            batch,
            input_len=arguments.input_len,
            output_len=output_len,
            seed=arguments.seed,
        )
        latencies, ttfts = [], []
        warm_ups = arguments.num_iters_warmup
        for index in tqdm(
            range(warm_ups + arguments.num_iters), disable=arguments.disable_tqdm, unit=" batches"
        ):
            done = await run_load(client.ask, samples, [0.0] * batch)
            all_answered(done.answers)
            if index >= warm_ups:
                latencies.append(done.duration)
                ttfts += [answer.ttft for answer in done.answers]
        return latencies, ttfts, engine_facts(engine, kernels)


def _report(
    arguments: argparse.Namespace,
    latencies: list[float],
    ttfts: list[float],
    about: dict[str, Any],
) -> None:
    from src.bench.environment import environment
    from src.bench.figures import summarize

    found, first = summarize(latencies, _PERCENTS), summarize(ttfts, (90.0, 99.0))
    outputs = arguments.batch_size * arguments.n * arguments.output_len
    print(f"Avg latency: {found.mean:.6f} seconds")
    print(f"Std latency: {found.std:.6f} seconds")
    for percent, value in found.percentiles.items():
        print(f"{percent:g}% percentile latency: {value:.6f} seconds")
    print(f"Median TTFT: {1000 * first.median:.2f} ms")
    print(f"Output token throughput: {outputs / found.mean:.2f} tok/s")
    if arguments.output_json is not None:
        result = {
            "avg_latency": found.mean,
            "std_latency": found.std,
            "latencies": latencies,
            "percentiles": percentile_map(found),
            "median_ttft": first.median,
            "output_throughput": outputs / found.mean,
            **about,
            "environment": environment(),
        }
        write_json(arguments.output_json, result)
