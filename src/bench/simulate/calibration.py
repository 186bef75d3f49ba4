"""Calibrates the simulator, with an engine driven for that purpose or from a server's timeline."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from src.bench.errors import BenchError
from src.bench.simulate.step_cost import MIN_STEPS, VERSION, StepCost, fit
from src.core.config import Config
from src.core.errors import ConfigError
from src.core.sampling_params import SamplingParams
from src.core.views import PoolView, TimelineView
from src.engine.client import AsyncEngine
from src.engine.scheduling.scheduler import SchedulerLimits

# Large enough that no step of a driven engine falls out of its timeline.
TIMELINE_STEPS: Final = 1_000_000
_MAX_OUTPUT: Final = 128


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a simulation needs to know of an engine; a file of ``bench calibrate``.

    Attributes
    ----------
    model, source
        The served model name, and where the steps were recorded.
    pipeline_depth
        Maximal number of steps in the device's queue.
    """

    model: str
    source: str
    limits: SchedulerLimits
    pipeline_depth: int
    cost: StepCost


def calibration_of(
    view: TimelineView, pool: PoolView, config: Config, *, model: str, max_model_len: int,
    device_type: str, source: str,
) -> Calibration:  # fmt: skip
    """Costs and limits from an engine's recorded timeline.

    Raises
    ------
    FitError
        Too little was recorded.
    """
    has_drafts = any(step.drafted_tokens for step in view.steps)
    # From arrival until queueing, a request takes time of the event loop: its prompt is processed.
    submits = [track.queued - track.arrival for track in view.requests]
    return Calibration(
        model=model,
        source=source,
        limits=SchedulerLimits.of(
            config,
            device_type=device_type,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            windows=tuple(pool.windows),
            content_key=model,
            max_model_len=max_model_len,
            whole_prompts=pool.whole_prompts,
            max_drafts=config.speculation.num_speculative_tokens if has_drafts else 0,
        ),
        pipeline_depth=config.scheduler.pipeline_depth,
        cost=fit(view.steps, statistics.median(submits) if submits else 0.0),
    )


async def calibrate_engine(
    engine: AsyncEngine, seconds: float, seed: int = 0, embed_share: float = 0.0
) -> Calibration:
    """Drive a ready engine for ``seconds``, and fit costs to the recorded steps; see `drive`.

    Raises
    ------
    FitError
        The time was too short.
    """
    view = await drive(engine, seconds, seed, embed_share)
    info = engine.model_info
    return calibration_of(
        view,
        await engine.inspector.pool(),
        engine.config,
        model=info.name,
        max_model_len=info.max_model_len,
        device_type=info.device_type,
        source=f"{len(view.steps)} steps of {seconds:g} s in this process",
    )


async def drive(
    engine: AsyncEngine, seconds: float, seed: int = 0, embed_share: float = 0.0
) -> TimelineView:
    """Keep a ready engine busy for ``seconds``, or until enough steps are done; returns the record.

    The number of rows and the length of prompts vary widely. Without variation of a step's work,
    the parts of its cost could not be told apart. ``embed_share`` of the requests, 0 to 1, are
    texts to embed; all of them of a model that does not generate.

    Raises
    ------
    InvalidRequestError
        The model does not embed.
    """
    info = engine.model_info
    if "generate" not in info.tasks:
        embed_share = 1.0
    if embed_share:
        info.check("embed")
    first_step = _last_step(engine)
    source = random.Random(seed)
    levels = list(_levels(engine.config.scheduler.max_num_seqs))
    # More time for higher levels: their steps take longer, and enough of them are needed, too.
    weights = [math.sqrt(level) for level in levels]
    for level, weight in zip(levels, weights, strict=True):
        deadline = time.monotonic() + seconds * weight / sum(weights)
        await _drive(engine, source, level, deadline, embed_share)
    return engine.inspector.timeline(after=first_step)


def _levels(most: int) -> Iterator[int]:
    """Numbers of concurrent requests: 1, 4, 16 and so on, and as many as fit."""
    level = 1
    while level < most:
        yield level
        level *= 4
    yield most


async def _drive(
    engine: AsyncEngine,
    source: random.Random,
    concurrency: int,
    deadline: float,
    embed_share: float,
) -> None:
    info = engine.model_info
    longest = max(1, info.max_model_len // 2)
    enough = _last_step(engine) + MIN_STEPS

    def is_over() -> bool:
        return time.monotonic() > deadline and _last_step(engine) >= enough

    async def one() -> None:
        while not is_over():
            # Uniform over orders of magnitude.
            length = round(math.exp(source.uniform(0.0, math.log(longest))))
            prompt = [source.randrange(info.vocab_size) for _ in range(length)]
            if embed_share and source.random() < embed_share:
                await engine.embed([prompt])
                continue
            output_len = source.randint(1, min(_MAX_OUTPUT, longest))
            params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
            async for _ in engine.stream(prompt, params):
                # A request that is not finished in time is not needed any more.
                if is_over():
                    break

    await asyncio.gather(*(one() for _ in range(concurrency)))


def _last_step(engine: AsyncEngine) -> int:
    last = engine.timeline.last
    return 0 if last is None else last.step_id


def save(calibration: Calibration, path: Path) -> None:
    """Save it as JSON.

    Raises
    ------
    BenchError
        The file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)) + b"\n")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from error


def load(path: Path) -> Calibration:
    """Read a file that `save` wrote.

    Raises
    ------
    ConfigError
        It cannot be read, or is not a calibration.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not a file of `bench calibrate`: {error}") from None
    if found.cost.version != VERSION:
        raise ConfigError(f"{path}: of version {found.cost.version}, expected {VERSION}")
    return found
