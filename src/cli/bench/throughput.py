"""``python -m src bench throughput``: all requests at once, in this process."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from src.cli.bench.dataset_options import add_dataset, positive, samples_of
from src.cli.bench.result_options import write_json
from src.cli.loading import open_engine
from src.cli.options import Commands, config_of
from src.cli.options import add_command as add
from src.core.config import Config
from src.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from src.bench.load import Run

ABOUT: Final = "How many tokens an engine in this process makes of requests that all come at once."


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(commands, "throughput", ABOUT, run)
    add_dataset(parser)
    parser.add_argument(
        "--n", type=positive, default=1, metavar="N", help="outputs of each prompt (default: 1)"
    )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="where figures are kept")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from src.bench.engine_client import measured_config

    num_requests = arguments.num_prompts * arguments.n
    config = measured_config(config_of(arguments), num_requests=num_requests)
    done, about = asyncio.run(_measure(config, arguments))
    _report(arguments, done, about)
    return 0


async def _measure(config: Config, arguments: argparse.Namespace) -> tuple[Run, dict[str, Any]]:
    from src.bench.engine_client import EngineClient, all_answered, engine_facts, fastest_kernels
    from src.bench.load import run_load
    from src.bench.progress import Progress

    async with open_engine(config) as engine:
        kernels = await fastest_kernels(engine)
        # As in vLLM: sample from all tokens, with the requested length for every output.
        whole = arguments.ignore_eos is not False
        params = SamplingParams(n=arguments.n, temperature=1.0, ignore_eos=whole)
        client = EngineClient(engine, params)
        samples = samples_of(arguments, client.codec)
        client.check_lengths(max(sample.prompt_len + sample.output_len for sample in samples))
        with Progress(len(samples), shown=not arguments.disable_tqdm) as progress:
            done = await run_load(client.ask, samples, [0.0] * len(samples), on_answer=progress)
        all_answered(done.answers)
        return done, engine_facts(engine, kernels)


def _report(arguments: argparse.Namespace, done: Run, about: dict[str, Any]) -> None:
    from src.bench.environment import environment
    from src.bench.metrics import measure

    metrics = measure(done.answers, done.duration)
    print(
        f"Throughput: {metrics.request_throughput:.2f} requests/s, "
        f"{metrics.total_token_throughput:.2f} total tokens/s, "
        f"{metrics.output_throughput:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {metrics.total_input_tokens}")
    print(f"Total num output tokens:  {metrics.total_output_tokens}")
    if arguments.output_json is not None:
        result = {
            "elapsed_time": done.duration,
            "num_requests": len(done.answers),
            "total_num_tokens": metrics.total_input_tokens + metrics.total_output_tokens,
            "requests_per_second": metrics.request_throughput,
            "tokens_per_second": metrics.total_token_throughput,
            "output_tokens_per_second": metrics.output_throughput,
            "total_cached_tokens": metrics.total_cached_tokens,
            **about,
            "environment": environment(),
        }
        write_json(arguments.output_json, result)
