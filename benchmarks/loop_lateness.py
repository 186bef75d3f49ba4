"""How late the event loop is while steps compute with as many threads as CPUs.

    python -m benchmarks.loop_lateness
    python -m benchmarks.loop_lateness --shape 7m --rows 1

A task in the engine's loop repeatedly sleeps for a millisecond; its additional sleep is the
lateness. The loop's own work for the engine (planning, committing, delivering) counts too, because
everything on the loop waits for both. For comparison, the lateness of the idle loop is measured,
and that with one thread, where no helper threads take part.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from benchmarks.load import MS, engine_client, random_prompts, side_by_side
from benchmarks.record import Recorder, add_common, figures_of, percentile
from benchmarks.shapes import SHAPES, write_checkpoint
from src import AsyncEngine, Config
from src.core.cpus import usable_cpus
from src.core.settings import load_config
from src.ops.build.kernels import ensure_built

INTERVAL = 0.001
_PROMPT_LEN = 16
_FIGURES = {"idle_p50": "ms", "idle_p99": "ms", "p50": "ms", "p99": "ms", "max": "ms", "tpot": "ms"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loop_lateness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=("7m", "0.35b"))
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 32), metavar="N")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of a repeat")
    add_common(parser, repeats=5)
    return parser.parse_args(arguments)


def configuration(directory: Path, threads: int) -> Config:
    overrides = [
        ("model.path", str(directory)),
        ("model.load_format", "dummy"),
        ("model.max_model_len", "8192"),
        ("scheduler.max_num_seqs", "64"),
        ("cache.memory_bytes", str(2**30)),
        ("device.type", "cpu"),
        ("device.num_threads", str(threads)),
        ("compile.startup", "wait"),
    ]
    return load_config(None, overrides=overrides)


async def lateness() -> list[float]:
    """Additional seconds of each sleep, until the task is cancelled; it then returns them."""
    found: list[float] = []
    try:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(INTERVAL)
            found.append(time.perf_counter() - begun - INTERVAL)
    except asyncio.CancelledError:
        return found


async def while_idle(seconds: float) -> list[float]:
    """The lateness of an idle loop."""
    task = asyncio.create_task(lateness())
    await asyncio.sleep(seconds)
    task.cancel()
    return await task


async def while_decoding(
    engine: AsyncEngine, rows: int, output_len: int, seed: int
) -> tuple[list[float], float]:
    """The loop's lateness while ``rows`` rows decode, and the median seconds per token."""
    prompts = random_prompts(rows, _PROMPT_LEN, engine.model_info.vocab_size, seed=seed)
    task = asyncio.create_task(lateness())
    answers = await side_by_side(engine_client(engine), prompts, output_len, rows)
    task.cancel()
    return await task, percentile([answer.tpot for answer in answers], 0.5)


async def measure(config: Config, rows: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """The figures of ``_FIGURES``, per repeat."""
    repeats = []
    async with AsyncEngine.open(config) as engine:
        _, tpot = await while_decoding(engine, rows, 16, seed=0)
        longest = engine.model_info.max_model_len - _PROMPT_LEN
        output_len = min(longest, max(16, round(options.seconds / tpot)))
        for repeat in range(options.repeats):
            idle = await while_idle(options.seconds / 4)
            busy, tpot = await while_decoding(engine, rows, output_len, seed=1 + repeat)
            values = {"idle_p50": percentile(idle, 0.5), "idle_p99": percentile(idle, 0.99)}
            values |= {"p50": percentile(busy, 0.5), "p99": percentile(busy, 0.99)}
            values |= {"max": max(busy), "tpot": tpot}
            repeats.append({name: MS * value for name, value in values.items()})
    return repeats


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    recorder = Recorder("loop_lateness", save=not options.no_save)
    kernels = ensure_built(wait=True)
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shape:
            directory = write_checkpoint(Path(folder) / shape, shape)
            for threads in sorted({1, usable_cpus()}):
                config = configuration(directory, threads)
                for rows in options.rows:
                    recorder.add(
                        f"{shape}, {rows} rows decode, {threads} threads",
                        figures_of(_FIGURES, asyncio.run(measure(config, rows, options))),
                        config=config,
                        kernels=kernels,
                        shape=shape,
                        rows=rows,
                        threads=threads,
                    )


if __name__ == "__main__":
    main()
