"""What `model.deterministic` costs: two engines side by side in one process, in turns.

    python -m benchmarks.determinism --shape 0.35b --layers 4 --dtype float32

Both hold dummy weights of one seed and get the same prompts one after the other, so that whatever
else the machine does meets both. The cost is one less the ratio of the throughputs of a turn, or of
what a second of processor time gave, which other work on the machine changes less; medians and
spans are over the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.load import engine_client, random_prompts, side_by_side, throughput
from benchmarks.record import Figure, Recorder, add_common
from benchmarks.shapes import SHAPES, write_checkpoint
from src import AsyncEngine, Config
from src.core.settings import load_config


class Load(NamedTuple):
    """Requests that are sent at once."""

    name: str
    requests: int
    input_len: int
    output_len: int


LOADS = (
    Load("decode", 8, 16, 32),
    Load("mixed", 8, 64, 16),
    Load("prompts", 1, 512, 1),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.determinism",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, metavar="N", help="instead of the shape's own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--threads", type=int, default=0, metavar="N")
    parser.add_argument("--compiled", action="store_true", help="wait for compiled code")
    add_common(parser, repeats=5)
    return parser.parse_args()


def configuration(directory: Path, options: argparse.Namespace, deterministic: bool) -> Config:
    overrides = [
        ("model.path", str(directory)),
        ("model.load_format", "dummy"),
        ("model.max_model_len", "2048"),
        ("model.dtype", options.dtype),
        ("model.deterministic", str(deterministic).lower()),
        ("device.type", "cpu"),
        ("device.num_threads", str(options.threads)),
        ("cache.num_blocks", "1024"),
        ("compile.startup", "wait" if options.compiled else "off"),
    ]
    if options.quantization is not None:
        overrides.append(("model.quantization", options.quantization))
    return load_config(None, overrides=overrides)


async def measure(engines: list[AsyncEngine], load: Load, repeats: int) -> dict[str, Figure]:
    """Throughputs of the first engine, which may be anything, and of the deterministic second."""
    clients = [engine_client(engine) for engine in engines]
    rates: list[list[float]] = [[], []]
    cpu_seconds: list[list[float]] = [[], []]
    for turn in range(repeats + 1):
        prompts = random_prompts(
            load.requests, load.input_len, engines[0].model_info.vocab_size, seed=turn
        )
        # The first of a turn is the second of the next.
        for index in (turn % 2, 1 - turn % 2):
            began = time.process_time()
            answers = await side_by_side(clients[index], prompts, load.output_len, load.requests)
            if turn:  # the first one warms up
                cpu_seconds[index].append(time.process_time() - began)
                rates[index].append(throughput(answers, load.input_len)["total_throughput"])
    costs = [100 * (1 - slow / fast) for fast, slow in zip(*rates, strict=True)]
    cpu_costs = [100 * (1 - less / more) for less, more in zip(*cpu_seconds, strict=True)]
    return {
        "default": Figure.of("tok/s", rates[0]),
        "deterministic": Figure.of("tok/s", rates[1]),
        "cost": Figure.of("%", costs),
        "cost_cpu": Figure.of("%", cpu_costs),
    }


async def run(options: argparse.Namespace) -> None:
    from src.ops.cpu.build import ensure_built

    kernels = ensure_built(wait=True)
    recorder = Recorder("determinism", save=not options.no_save)
    with tempfile.TemporaryDirectory() as scratch:
        directory = write_checkpoint(
            Path(scratch) / options.shape, options.shape, layers=options.layers
        )
        configs = [configuration(directory, options, value) for value in (False, True)]
        async with AsyncEngine.open(configs[0]) as one, AsyncEngine.open(configs[1]) as two:
            for load in LOADS:
                figures = await measure([one, two], load, options.repeats)
                about = {"kernels": kernels, "shape": options.shape, **load._asdict()}
                recorder.add(load.name, figures, config=configs[1], **about)


def main() -> None:
    asyncio.run(run(parse()))


if __name__ == "__main__":
    main()
