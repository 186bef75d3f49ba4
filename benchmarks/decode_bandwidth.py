"""How close a single stream comes to the memory bandwidth: each token reads all weights once.

    python -m benchmarks.decode_bandwidth --shape 0.35b

The memory bandwidth, with the same number of threads, is measured before and after each request,
because a shared machine changes by the minute. A turn's figure is the bytes of the weights over the
time per output token, relative to the mean of the two bandwidths.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.load import MS, engine_client, one_by_one, random_prompts
from benchmarks.record import Recorder, add_common, figures_of
from benchmarks.shapes import SHAPES, write_checkpoint
from src import AsyncEngine, Config
from src.core.cpus import usable_cpus
from src.core.settings import load_config
from src.engine.sizing.roofline import best_seconds
from src.ops.build.kernels import ensure_built

_READ_BYTES = 2**29
_FIGURES = {"tpot": "ms", "weights": "GB/s", "memory": "GB/s", "fraction": "of bandwidth"}
_KINDS = ("bfloat16", "int8", "int4")
_FLOAT_BYTES = 4


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_bandwidth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.35b")
    parser.add_argument("--weights", nargs="+", choices=_KINDS, default=_KINDS)
    parser.add_argument("--output-len", type=int, default=64, metavar="O", help="tokens")
    add_common(parser, repeats=9)
    return parser.parse_args()


def configuration(directory: Path, weights: str) -> Config:
    overrides = [
        ("model.path", str(directory)),
        ("model.load_format", "dummy"),
        ("model.max_model_len", "1024"),
        ("cache.num_blocks", "128"),
        ("device.type", "cpu"),
        ("compile.startup", "wait"),
    ]
    if weights != "bfloat16":
        overrides.append(("model.quantization", weights))
    return load_config(None, overrides=overrides)


def bytes_of_a_token(shape: dict[str, Any], weights: str, group: int) -> float:
    """Bytes of all matrices that a decode step of one row reads, including their scales."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    query = shape["num_attention_heads"] * shape["head_dim"]
    key_value = 2 * shape["num_key_value_heads"] * shape["head_dim"]
    layer = [(query + key_value, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)]

    def size(outputs: int, inputs: int, weights: str) -> float:
        if weights == "bfloat16":
            return 2.0 * outputs * inputs
        if weights == "int8":
            return outputs * (inputs + _FLOAT_BYTES)
        return outputs * (inputs / 2 + _FLOAT_BYTES * inputs / group)

    # The LM head is at least int8.
    head = size(shape["vocab_size"], hidden, "int8" if weights == "int4" else weights)
    layers: int = shape["num_hidden_layers"]
    return head + layers * sum(size(outputs, inputs, weights) for outputs, inputs in layer)


def bandwidth(data: torch.Tensor, threads: int) -> float:
    """Bytes per second at which ``threads`` threads read a tensor."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return data.nbytes / best_seconds(data.sum, data.device)
    finally:
        torch.set_num_threads(before)


async def measure(config: Config, size: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    data = torch.ones(_READ_BYTES // _FLOAT_BYTES)
    turns = []
    async with AsyncEngine.open(config) as engine:
        vocab_size = engine.model_info.vocab_size
        client, threads = engine_client(engine), config.device.num_threads or usable_cpus()
        prompts = random_prompts(options.repeats + 1, 16, vocab_size, seed=1)
        await one_by_one(client, prompts[:1], options.output_len)
        before = bandwidth(data, threads)
        for prompt in prompts[1:]:
            (answer,) = await one_by_one(client, [prompt], options.output_len)
            after = bandwidth(data, threads)
            memory, weights = (before + after) / 2, size / answer.tpot
            turns.append(
                {
                    "tpot": MS * answer.tpot,
                    "weights": weights / 1e9,
                    "memory": memory / 1e9,
                    "fraction": weights / memory,
                }
            )
            before = after
    return turns


def main() -> None:
    options = parse()
    recorder = Recorder("decode_bandwidth", save=not options.no_save)
    kernels = ensure_built(wait=True)
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder), options.shape)
        for weights in options.weights:
            config = configuration(directory, weights)
            size = bytes_of_a_token(
                SHAPES[options.shape], weights, config.model.quantization_group_size
            )
            turns = asyncio.run(measure(config, size, options))
            recorder.add(
                f"{options.shape}, {weights}, one stream",
                figures_of(_FIGURES, turns),
                config=config,
                kernels=kernels,
                bytes_of_a_token=size,
            )


if __name__ == "__main__":
    main()
