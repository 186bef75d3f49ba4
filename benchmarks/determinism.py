"""The cost of `model.deterministic`: two engines in one process, in turns.

    python -m benchmarks.determinism                # 7 M and 0.35 B, bfloat16 and int8, compiled
    python -m benchmarks.determinism --shape 0.35b --layers 4 --weights float32 --eager

Both have dummy weights from one seed and get the same prompts one after the other, so that changes
of the machine affect both. The order is drawn for every load of every turn. The loads are those of
the comparison with other engines. The cost is the loss of a turn's throughput, or of the work per
second of CPU time, which other programs affect less. Medians and ranges are over the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.load import engine_client, side_by_side
from benchmarks.peers.workloads import WORKLOADS, Measured, Workload
from benchmarks.record import Figure, Recorder, add_common
from benchmarks.shapes import SHAPES, write_checkpoint
from src import AsyncEngine, Config
from src.core.settings import load_config
from src.ops.build.kernels import ensure_built

WEIGHTS: Final[dict[str, dict[str, str]]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
# Workload -> the compared figure.
_LOADS: Final = {"many": "output", "one": "tpot", "prefill": "prefill"}
# Large enough that no request is preempted.
_CACHE_BYTES: Final = 512 * 2**20


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.determinism",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=("7m", "0.35b"))
    parser.add_argument("--layers", type=int, metavar="N", help="instead of the shape's own")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=("bfloat16", "int8"))
    parser.add_argument("--threads", type=int, default=0, metavar="N")
    parser.add_argument("--eager", action="store_true", help="without compiled code")
    add_common(parser, repeats=5)
    return parser.parse_args()


def configuration(
    directory: Path, weights: str, options: argparse.Namespace, *, deterministic: bool
) -> Config:
    overrides = [
        ("model.path", str(directory)),
        ("model.load_format", "dummy"),
        ("model.max_model_len", "4096"),
        ("model.deterministic", str(deterministic).lower()),
        ("device.type", "cpu"),
        ("device.num_threads", str(options.threads)),
        ("cache.memory_bytes", str(_CACHE_BYTES)),
        ("compile.startup", "off" if options.eager else "wait"),
    ]
    overrides += [(f"model.{name}", value) for name, value in WEIGHTS[weights].items()]
    return load_config(None, overrides=overrides)


class Turn(NamedTuple):
    """One engine's result for a load."""

    value: float
    cpu_seconds: float


async def answered(engine: AsyncEngine, load: Workload, figure: Measured, turn: int) -> Turn:
    prompts = load.prompts(turn, engine.model_info.vocab_size)
    began = time.process_time()
    answers = await side_by_side(engine_client(engine), prompts, load.output_len, len(prompts))
    seconds = time.process_time() - began
    return Turn(figure.measure(answers, load.input_len), seconds)


def figures_of(figure: Measured, turns: list[dict[bool, Turn]]) -> dict[str, Figure]:
    """Figures from turns; each turn has the deterministic engine's result under ``True``."""

    def lost(turn: dict[bool, Turn]) -> float:
        return 100 * (1 - figure.ratio(turn[True].value, turn[False].value))

    def lost_cpu(turn: dict[bool, Turn]) -> float:
        return 100 * (1 - turn[False].cpu_seconds / turn[True].cpu_seconds)

    return {
        "default": Figure.of(figure.unit, [turn[False].value for turn in turns]),
        "deterministic": Figure.of(figure.unit, [turn[True].value for turn in turns]),
        "cost": Figure.of("%", [lost(turn) for turn in turns]),
        "cost_cpu": Figure.of("%", [lost_cpu(turn) for turn in turns]),
    }


async def compare(
    directory: Path, shape: str, weights: str, recorder: Recorder, options: argparse.Namespace
) -> None:
    """Run both engines on one checkpoint with every load in every turn; the first is a warm-up."""
    kernels = ensure_built(wait=True)
    chance = random.Random(f"{shape} {weights}")
    configs = {
        value: configuration(directory, weights, options, deterministic=value)
        for value in (False, True)
    }
    turns: dict[str, list[dict[bool, Turn]]] = {name: [] for name in _LOADS}
    async with contextlib.AsyncExitStack() as stack:
        engines = {
            value: await stack.enter_async_context(AsyncEngine.open(config))
            for value, config in configs.items()
        }
        assert all(engine.stats.compiled != options.eager for engine in engines.values())
        for turn in range(options.repeats + 1):
            for name, figure in _LOADS.items():
                load = WORKLOADS[name]
                order = chance.sample((False, True), 2)
                found = {
                    value: await answered(engines[value], load, load.figures[figure], turn)
                    for value in order
                }
                if turn:
                    turns[name].append(found)
    for name, figure in _LOADS.items():
        load = WORKLOADS[name]
        recorder.add(
            f"{shape}, {weights}: {load.about}",
            figures_of(load.figures[figure], turns[name]),
            config=configs[True],
            kernels=kernels,
            shape=shape,
            weights=weights,
            layers=options.layers or SHAPES[shape]["num_hidden_layers"],
            compiled=not options.eager,
            workload=name,
            figure=figure,
        )


async def run(options: argparse.Namespace) -> None:
    recorder = Recorder("determinism", save=not options.no_save)
    with tempfile.TemporaryDirectory() as scratch:
        for shape in options.shape:
            directory = write_checkpoint(Path(scratch) / shape, shape, layers=options.layers)
            for weights in options.weights:
                await compare(directory, shape, weights, recorder, options)


def main() -> None:
    asyncio.run(run(parse()))


if __name__ == "__main__":
    main()
