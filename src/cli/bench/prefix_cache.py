"""``python -m src bench prefix-cache``: measures prompts with and without cached prefixes."""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from src.cli.bench.dataset_options import natural, positive
from src.cli.bench.result_options import write_json
from src.cli.loading import open_engine
from src.cli.options import Commands, config_of
from src.cli.options import add_command as add
from src.core.config import Config
from src.core.errors import ConfigError
from src.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from src.bench.codecs import Codec
    from src.bench.metrics import Metrics
    from src.bench.samples import Sample

ABOUT: Final = "What the prefix cache spares: the same prompts without it, empty and filled."
_WITHOUT: Final = "without"
_EMPTY: Final = "empty at first"
_FILLED: Final = "filled"


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(commands, "prefix-cache", ABOUT, run)
    for name, default, about in (
        ("--num-prompts", 20, "different prompts"),
        ("--repeat-count", 5, "times that each is sent"),
        ("--output-len", 10, "tokens of each output"),
    ):
        parser.add_argument(
            name, type=positive, default=default, metavar="N", help=f"{about} (default: {default})"
        )
    parser.add_argument(
        "--input-length-range", type=_range, default="128:256", metavar="MIN:MAX",
        help="tokens of prompts, without the common prefix (default: 128:256)",
    )  # fmt: skip
    parser.add_argument(
        "--prefix-len", type=natural, default=0, metavar="N",
        help="tokens that all prompts begin with (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--dataset-path", type=Path, metavar="FILE",
        help="conversations in ShareGPT's format; without it prompts are random",
    )  # fmt: skip
    parser.add_argument("--sort", action="store_true", help="short prompts first, not in any order")
    parser.add_argument(
        "--max-concurrency", type=positive, metavar="N",
        help="requests at once at most (default: all)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="where figures are kept")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from src.bench.engine_client import measured_config, without_prefix_cache

    if arguments.dataset_path is not None and arguments.prefix_len:
        raise ConfigError("--prefix-len is for random prompts, and --dataset-path has others")
    num_requests = arguments.num_prompts * arguments.repeat_count
    config = measured_config(config_of(arguments), num_requests=num_requests)
    if not config.cache.enable_prefix_caching:
        raise ConfigError("cache.enable_prefix_caching is false: there is nothing to measure")
    found = asyncio.run(_measure(without_prefix_cache(config), (_WITHOUT,), arguments))
    found |= asyncio.run(_measure(config, (_EMPTY, _FILLED), arguments))
    _report(arguments, found)
    return 0


async def _measure(
    config: Config, passes: tuple[str, ...], arguments: argparse.Namespace
) -> dict[str, Metrics]:
    """The metrics of the same requests, once per pass, on one engine."""
    from src.bench.engine_client import EngineClient, all_answered, fastest_kernels
    from src.bench.load import run_load
    from src.bench.metrics import measure
    from src.bench.progress import Progress

    found = {}
    async with open_engine(config) as engine:
        await fastest_kernels(engine)
        client = EngineClient(engine, SamplingParams(temperature=0.0, ignore_eos=True))
        samples = _samples(arguments, client.codec)
        client.check_lengths(max(sample.prompt_len + sample.output_len for sample in samples))
        # First-time work must not be counted in the first pass.
        warm_up = await run_load(client.ask, samples[:1], [0.0])
        all_answered(warm_up.answers)
        engine.inspector.reset_prefix_cache()
        for name in passes:
            with Progress(len(samples), shown=not arguments.disable_tqdm) as progress:
                done = await run_load(
                    client.ask,
                    samples,
                    [0.0] * len(samples),
                    max_concurrency=arguments.max_concurrency,
                    on_answer=progress,
                )
            all_answered(done.answers)
            found[name] = measure(done.answers, done.duration)
    return found


def _samples(arguments: argparse.Namespace, codec: Codec) -> list[Sample]:
    from src.bench.dataset_files import sharegpt_samples
    from src.bench.samples import random_samples

    low, high = arguments.input_length_range
    source = random.Random(arguments.seed)
    if arguments.dataset_path is not None:
        found = sharegpt_samples(
            arguments.dataset_path,
            codec,
            arguments.num_prompts,
            output_len=arguments.output_len,
            lengths=(low, high),
            oversample=False,
            seed=arguments.seed,
        )
    else:
        found = random_samples(
            codec.ids,
            arguments.num_prompts,
            input_len=(low, high),
            output_len=arguments.output_len,
            prefix_len=arguments.prefix_len,
            seed=arguments.seed,
        )
    samples: list[Sample] = found * arguments.repeat_count
    if arguments.sort:
        samples.sort(key=lambda sample: sample.prompt_len)
    else:
        source.shuffle(samples)
    return samples


def _report(arguments: argparse.Namespace, found: dict[str, Metrics]) -> None:
    from src.bench.environment import environment

    print(f"{'prefix cache':<16}{'cost time (s)':>14}{'TTFT (ms)':>12}{'P99':>10}{'cached':>10}")
    for name, metrics in found.items():
        ttft, cached = metrics.ttft.scaled(1000), _cached(metrics)
        print(
            f"{name:<16}{metrics.duration:>14.3f}{ttft.median:>12.2f}"
            f"{ttft.percentiles[99]:>10.2f}{100 * cached:>8.1f} %"
        )
    if arguments.output_json is not None:
        fields: dict[str, Any] = {
            name.replace(" ", "_"): {
                "cost_time": metrics.duration,
                "median_ttft": metrics.ttft.median,
                "p99_ttft": metrics.ttft.percentiles[99],
                "cached_fraction": _cached(metrics),
                "output_throughput": metrics.output_throughput,
            }
            for name, metrics in found.items()
        }
        write_json(arguments.output_json, {**fields, "environment": environment()})


def _cached(metrics: Metrics) -> float:
    return metrics.total_cached_tokens / max(1, metrics.total_input_tokens)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"expected MIN:MAX from 1 on, got {text!r}")
    return int(low), int(high)
