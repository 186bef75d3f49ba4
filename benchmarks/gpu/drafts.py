"""What drafts bring and cost on the device: engines with and without them, in turns.

A model of a real shape with random weights answers from prompts. A bias makes a text repeat one
token, so that every draft is right; at temperature 1 it repeats nothing, and then drafts must cost
nothing. Before that the look-up alone is timed, of texts in which every place is a match.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.session import Session
from benchmarks.gpu.table import Row
from benchmarks.load import random_prompts
from benchmarks.record import Figure
from benchmarks.shapes import write_checkpoint
from src import AsyncEngine, SamplingParams
from src.core.config import Config
from src.core.settings import load_config
from src.ops import look_up
from src.ops.build.kernels import ensure_built

# Drafts may cost this much where they are of no use: the scatter of two engines alike.
_NO_LOSS = 0.98
_TOKEN = 5


@dataclass(frozen=True)
class Sizes:
    """Rows and tokens of look-ups; numbers of rows, and tokens, of answers."""

    looked: int = 64
    window: int = 8192
    rows: tuple[int, ...] = (1, 8, 64)
    prompt: int = 64
    output: int = 192


QUICK = Sizes(looked=2, window=512, rows=(2,), prompt=8, output=24)


def sizes(options: argparse.Namespace) -> Sizes:
    return QUICK if options.quick else Sizes()


def looking(size: Sizes) -> str:
    return f"look-up of drafts of {size.looked} rows of {size.window}"


def repeated(rows: int) -> str:
    return f"a text that repeats itself, {rows} rows: faster by drafts"


def plain(rows: int) -> str:
    return f"a text that does not, {rows} rows: faster by drafts"


def figures(options: argparse.Namespace) -> list[str]:
    size = sizes(options)
    return [looking(size), *(kind(rows) for rows in size.rows for kind in (repeated, plain))]


def run(session: Session) -> None:
    if not session.on_cuda:
        ensure_built(wait=True)
    size = sizes(session.options)
    with session.attempt(looking(size)):
        times = Figure.of("us", _look_ups(session, size))
        session.record(looking(size), {"time": times})
        session.row(Row(looking(size), "us", times.median))
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        path = write_checkpoint(Path(folder), session.options.shape)
        asyncio.run(_measure(session, size, path))


def _look_ups(session: Session, size: Sizes) -> list[float]:
    """Microseconds of a look-up, on average of several that are launched together."""
    device, count = session.device, size.looked
    tokens = torch.full((count, size.window), _TOKEN, dtype=torch.int32, device=device)
    rows = torch.arange(count, device=device)
    lengths = torch.full((count,), size.window, dtype=torch.int32, device=device)
    wanted = torch.full((count,), 16, dtype=torch.int32, device=device)
    launches, times = (20, session.options.repeats) if session.on_cuda else (1, 1)
    found = []
    for _ in range(1 + times):
        _wait_for(device)
        begun = time.perf_counter()
        for _ in range(launches):
            drafts = look_up(tokens, rows, lengths, wanted, 3, 24, 16)
        _wait_for(device)
        found.append(1e6 * (time.perf_counter() - begun) / launches)
    # Of a token that never changes all drafts are that token.
    assert (drafts[:, 2:] == _TOKEN).all()
    return found[1:]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _configuration(session: Session, path: Path, method: str, size: Sizes) -> Config:
    options = session.options
    # Enough for all rows, and of both engines there is room for.
    blocks = max(size.rows) * (size.prompt + size.output + 64) // 16 + 16
    return load_config(
        overrides=[
            ("model.path", str(path)),
            ("model.load_format", "dummy"),
            ("model.max_model_len", str(4 * (size.prompt + size.output))),
            ("device.type", session.device.type),
            ("cache.block_size", "16"),
            ("cache.num_blocks", str(2 * blocks)),
            ("cache.enable_prefix_caching", "false"),
            ("scheduler.max_num_seqs", str(max(size.rows))),
            ("compile.startup", "wait"),
            ("compile.cuda_graphs", "wait"),
            ("compile.enforce_eager", str(options.eager).lower()),
            ("speculation.method", method),
            ("observability.stats_interval", "0"),
        ]
    )


async def _measure(session: Session, size: Sizes, path: Path) -> None:
    async with AsyncExitStack() as stack:
        config = _configuration(session, path, "suffix", size)
        engines = {
            method: await stack.enter_async_context(
                AsyncEngine.open(_configuration(session, path, method, size))
            )
            for method in ("off", "suffix")
        }
        for rows in size.rows:
            for name, params, goal in (
                (repeated(rows), SamplingParams(temperature=0, logit_bias={_TOKEN: 100.0}), None),
                (plain(rows), SamplingParams(temperature=1.0, seed=rows), _NO_LOSS),
            ):
                params = params.__replace__(max_tokens=size.output, ignore_eos=True)
                with session.attempt(name):
                    ratios = await _ratios(session, engines, rows, size, params)
                    ratio = Figure.of("times", ratios)
                    session.record(name, {"ratio": ratio}, config=config)
                    # A CPU shows that it runs, on a machine that does other things as well.
                    goal = goal if session.on_cuda and not session.options.quick else None
                    session.row(Row(name, "times", ratio.median, goal=goal, rises=True))


async def _ratios(
    session: Session,
    engines: dict[str, AsyncEngine],
    rows: int,
    size: Sizes,
    params: SamplingParams,
) -> list[float]:
    """Seconds without drafts over seconds with; a first, uncounted pair learns what drafts cost."""
    ratios = []
    for repeat in range(1 + session.options.repeats):
        taken = {}
        # In turns, so that what changes meanwhile meets both.
        for method in ("off", "suffix") if repeat % 2 else ("suffix", "off"):
            engine = engines[method]
            vocab_size = engine.model_info.vocab_size
            prompts = random_prompts(rows, size.prompt, vocab_size, seed=repeat)
            begun = time.perf_counter()
            results = await asyncio.gather(*(engine.generate(each, params) for each in prompts))
            taken[method] = time.perf_counter() - begun
            assert all(len(result.token_ids) == size.output for result in results)
        ratios.append(taken["off"] / taken["suffix"])
    return ratios[1:]
