"""Vectors of texts by a model of a real shape with random weights, on the engine as it serves.

Measures one short text alone, and many texts at once: from the call to the last vector on the host,
since nobody reads a step's vectors before they are there.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.limits import cost_of
from benchmarks.gpu.session import Session
from benchmarks.gpu.table import Row
from benchmarks.load import MS, random_prompts
from benchmarks.record import Figure
from benchmarks.shapes import write_checkpoint
from src import AsyncEngine
from src.core.config import Config
from src.core.settings import load_config
from src.engine.sizing.roofline import Roofline
from src.ops.build.kernels import ensure_built


@dataclass(frozen=True)
class Sizes:
    """Tokens of the lone text; number and tokens of the texts that come at once."""

    lone: int = 16
    texts: int = 1024
    tokens: int = 128


QUICK = Sizes(lone=4, texts=8, tokens=24)


def sizes(options: argparse.Namespace) -> Sizes:
    return QUICK if options.quick else Sizes()


def lone(size: Sizes) -> str:
    return f"vector of a lone text of {size.lone}"


def many(size: Sizes) -> str:
    return f"vectors of {size.texts} texts of {size.tokens}"


def figures(options: argparse.Namespace) -> list[str]:
    size = sizes(options)
    return [lone(size), many(size)]


def run(session: Session) -> None:
    if not session.on_cuda:
        ensure_built(wait=True)
    roof = session.roofline()
    options = session.options
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        config = load_config(
            overrides=[
                ("model.path", str(write_checkpoint(Path(folder), options.shape))),
                ("model.load_format", "dummy"),
                ("device.type", session.device.type),
                ("cache.enable_prefix_caching", "false"),
                ("compile.startup", "wait"),
                ("compile.cuda_graphs", "wait"),
                ("compile.enforce_eager", str(options.eager).lower()),
                ("observability.stats_interval", "0"),
            ]
        )
        asyncio.run(_measure(session, config, roof))


async def _measure(session: Session, config: Config, roof: Roofline) -> None:
    size, cost = sizes(session.options), cost_of(session.options.shape)
    async with AsyncEngine.open(config) as engine:
        about = {"shape": session.options.shape, "compiled": engine.stats.compiled}
        with session.attempt(lone(size)):
            seconds = await _times(session, engine, 1, size.lone)
            measured = Figure.of("ms", [MS * each for each in seconds])
            limit = max(
                cost.weight_bytes / roof.bandwidth, cost.prefill_flops(size.lone) / roof.flops
            )
            session.record(lone(size), {"time": measured}, config=config, **about)
            session.row(Row(lone(size), "ms", measured.median, limit=MS * limit))
        with session.attempt(many(size)):
            seconds = await _times(session, engine, size.texts, size.tokens)
            flops = size.texts * cost.prefill_flops(size.tokens)
            arithmetic = Figure.of("TFLOP/s", [flops / each / 1e12 for each in seconds])
            rate = Figure.of("tok/s", [size.texts * size.tokens / each for each in seconds])
            session.record(
                many(size), {"arithmetic": arithmetic, "rate": rate}, config=config, **about
            )
            session.row(
                Row(
                    many(size),
                    "TFLOP/s",
                    arithmetic.median,
                    limit=roof.flops / 1e12,
                    rises=True,
                    note=f"{rate.median:.3g} tok/s",
                )
            )


async def _times(session: Session, engine: AsyncEngine, texts: int, tokens: int) -> list[float]:
    """Seconds of each repetition; a first, uncounted one may compile kernels."""
    taken = []
    for seed in range(1 + session.options.repeats):
        prompts = random_prompts(texts, tokens, engine.model_info.vocab_size, seed=seed)
        begun = time.perf_counter()
        vectors = await engine.embed(prompts)
        taken.append(time.perf_counter() - begun)
        assert len(vectors) == texts
    return taken[1:]
