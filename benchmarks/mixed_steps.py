"""The host's CPU time for steps with a prompt on CUDA, captured in pieces and not.

    python -m benchmarks.mixed_steps                                       # with a GPU
    python -m tests.null_cuda --module benchmarks.mixed_steps              # without, see there

A step of few tokens takes a GPU a few milliseconds. If the host takes as long to launch it, the GPU
waits. So this measures the thread that launches steps, in CPU time, which others hardly affect:
from the plan to the last launch, without the event loop. On the CUDA that computes nothing the
figures are those of torch's, Triton's and this project's code; a real driver adds its own.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.clocks import Clocks
from benchmarks.load import random_prompts
from benchmarks.record import Recorder, add_common, figures_of
from benchmarks.shapes import SHAPES, write_checkpoint
from src import AsyncEngine, Config, SamplingParams
from src.core.collector import freeze_collector, thaw_collector
from src.core.settings import load_config

TOKENS = (16, 64, 300, 2048)
_MOST_CAPTURED = 512
_WARM_UP = 3


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mixed_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="N")
    parser.add_argument("--graphs", nargs="+", choices=("off", "wait"), default=("wait", "off"))
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="per repeat")
    parser.add_argument("--eager", action="store_true", help="without compiled code")
    add_common(parser, repeats=5)
    return parser.parse_args(arguments)


def configuration(directory: Path, graphs: str, *, eager: bool) -> Config:
    """An engine whose steps of up to ``_MOST_CAPTURED`` tokens are captured, or none."""
    overrides = [
        ("model.path", str(directory)),
        ("model.load_format", "dummy"),
        ("model.max_model_len", "4096"),
        ("scheduler.max_num_batched_tokens", "4096"),
        ("scheduler.max_num_seqs", "8"),
        ("cache.num_blocks", "512"),
        ("device.type", "cuda"),
        ("compile.enforce_eager", "true" if eager else "false"),
        ("compile.startup", "off" if eager else "wait"),
        ("compile.cuda_graphs", graphs),
        ("compile.cuda_graph_max_tokens", str(_MOST_CAPTURED)),
        ("observability.stats_interval", "0"),
    ]
    return load_config(None, overrides=overrides)


async def measure(
    config: Config, tokens: Sequence[int], steps: int, repeats: int
) -> dict[int, list[float]]:
    """Milliseconds of a step with a prompt of so many tokens, one value per repeat."""
    from src.engine.execution.step_computer import StepComputer

    params = SamplingParams(max_tokens=1, temperature=0)
    found: dict[int, list[float]] = {count: [] for count in tokens}
    async with AsyncEngine.open(config) as engine:
        vocab_size = engine.model_info.vocab_size
        freeze_collector()
        clocks = Clocks()
        clocks.measure("compute", StepComputer, "compute")
        try:
            for repeat in range(repeats + 1):
                for count in tokens:
                    clocks.clear()
                    wanted = steps if repeat else _WARM_UP
                    for prompt in random_prompts(wanted, count, vocab_size, seed=repeat):
                        await engine.generate(prompt, params)
                    values = clocks.values["compute"]
                    if len(values) != wanted:
                        raise RuntimeError(f"{wanted} prompts took {len(values)} steps")
                    if repeat:
                        found[count].append(1000 * sorted(values)[len(values) // 2])
        finally:
            clocks.close()
            thaw_collector()
    return found


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    recorder = Recorder("mixed_steps", save=not options.no_save)
    layers = SHAPES[options.shape]["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder), options.shape)
        for graphs in options.graphs:
            config = configuration(directory, graphs, eager=options.eager)
            found = asyncio.run(measure(config, options.tokens, options.steps, options.repeats))
            for tokens, values in found.items():
                captured = graphs != "off" and tokens <= _MOST_CAPTURED
                repeats = [{"step": each, "layer": 1000 * each / layers} for each in values]
                recorder.add(
                    f"{options.shape}, {tokens} tokens, {'captured' if captured else 'launched'}, "
                    "processor time of the host",
                    figures_of({"step": "ms", "layer": "us"}, repeats),
                    config=config,
                    tokens=tokens,
                    captured=captured,
                )


if __name__ == "__main__":
    main()
