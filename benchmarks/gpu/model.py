"""A model of a real shape with random weights, on the engine as it serves.

Measures prefill of one prompt; decode steps of several rows at one context length, and the device's
waiting time between them; an offline batch; and the kernels of a step. Times come from the events
that the device records around each step, and from when the host saw a step's end.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.limits import ModelCost, cost_of
from benchmarks.gpu.profile import Kernels, idle_share, profiled
from benchmarks.gpu.session import Session
from benchmarks.gpu.table import Row
from benchmarks.load import MS, engine_client, random_prompts, side_by_side
from benchmarks.record import Figure
from benchmarks.shapes import SHAPES, write_checkpoint
from src import AsyncEngine, SamplingParams
from src.core.config import Config
from src.core.settings import load_config
from src.core.steps import StepRecord
from src.engine.sizing.roofline import Roofline
from src.ops.build.kernels import ensure_built

# Seconds reserved for profiling; an offline batch is only begun if this much would be left.
_PROFILE_SECONDS = 30.0
# Prompt length before the steps in which idle time is profiled. With short contexts steps are
# short, so the host has the least time to prepare the next one.
_SHORT_PROMPT = 16
# Expected duration of an offline batch, relative to that of its steps.
_SLACK = 1.3


@dataclass(frozen=True)
class Sizes:
    """The extent of the measurements.

    Attributes
    ----------
    rows
        Numbers of rows for decode steps; the last one is also that of the offline batch.
    context, window
        Average context of the rows in tokens, and the number of consecutive steps measured.
    prompt, output
        Tokens of the requests that reach this context.
    prefill
        Tokens of the single prompt.
    offline
        Input and output tokens.
    profiled
        Number of profiled decode steps.
    idle
        Number of rows for profiling the time without a kernel.
    """

    rows: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 1024
    window: int = 64
    # Rows that are admitted first decode some hundred tokens while others are prefilled.
    prompt: int = 880
    output: int = 280
    prefill: int = 2048
    offline: tuple[int, int] = (1000, 1000)
    profiled: int = 16
    idle: tuple[int, ...] = (1, 64, 256)


QUICK = Sizes(
    rows=(1, 2, 4), context=96, window=8, prompt=80, output=32, prefill=128, offline=(32, 16),
    profiled=4, idle=(1, 4),
)  # fmt: skip


def sizes(options: argparse.Namespace) -> Sizes:
    return QUICK if options.quick else Sizes()


def figures(options: argparse.Namespace) -> list[str]:
    size = sizes(options)
    return [
        *(inter_token(rows, size) for rows in size.rows),
        prefill(size),
        offline(size),
        *(bubble(rows) for rows in size.rows),
        *map(without_kernel, size.idle),
        *_kernel_figures(),
    ]


def inter_token(rows: int, size: Sizes) -> str:
    return f"inter-token time, {_rows(rows)} at {size.context}"


def bubble(rows: int) -> str:
    return f"bubble, {_rows(rows)}"


def without_kernel(rows: int) -> str:
    return f"profiled: no kernel runs, {_rows(rows)}"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def prefill(size: Sizes) -> str:
    return f"prefill of {size.prefill}"


def offline(size: Sizes) -> str:
    inputs, outputs = size.offline
    return f"offline, {size.rows[-1]} rows, {inputs} in, {outputs} out"


def _kernel_figures() -> tuple[str, str]:
    return "kernels per layer, decode", "kernels per layer, prefill"


def run(session: Session) -> None:
    if not session.on_cuda:
        ensure_built(wait=True)
    roof = session.roofline()
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        config = _configuration(session, Path(folder))
        asyncio.run(_measure(session, config, roof))


def _configuration(session: Session, folder: Path) -> Config:
    options = session.options
    return load_config(
        overrides=[
            ("model.path", str(write_checkpoint(folder, options.shape))),
            ("model.load_format", "dummy"),
            ("device.type", session.device.type),
            ("cache.enable_prefix_caching", "false"),
            ("compile.startup", "wait"),
            ("compile.cuda_graphs", "wait"),
            ("compile.enforce_eager", str(options.eager).lower()),
            ("scheduler.max_num_seqs", str(sizes(options).rows[-1])),
            ("observability.stats_interval", "0"),
        ]
    )


async def _measure(session: Session, config: Config, roof: Roofline) -> None:
    size, begun = sizes(session.options), time.monotonic()
    async with AsyncEngine.open(config) as engine:
        started = Figure.of("s", [time.monotonic() - begun])
        session.record("ready with all code and graphs", {"start": started}, config=config)
        runs = Runs(session, engine, config, roof)
        with session.attempt(prefill(size)):
            await runs.prefill()
        for rows in size.rows:
            with session.attempt(inter_token(rows, size), bubble(rows)):
                await runs.decode(rows)
        with session.attempt(offline(size)):
            await runs.offline()
        profiles = [*map(without_kernel, size.idle), *_kernel_figures()]
        with session.attempt(*profiles):
            if not session.on_cuda and engine.stats.compiled:
                text = "compiled, a step is one call on the CPU"
                session.without(profiles, "impossible", text)
                return
            await runs.kernels()
            for rows in size.idle:
                await runs.idle(rows)


class Runs:
    """The measurements of one ready engine."""

    def __init__(
        self, session: Session, engine: AsyncEngine, config: Config, roof: Roofline
    ) -> None:
        self._session = session
        self._engine = engine
        self._config = config
        self._roof = roof
        options = session.options
        self._size = sizes(options)
        self._repeats: int = options.repeats
        self._cost: ModelCost = cost_of(options.shape)
        goals = session.goals
        # None: other options than the goals assume.
        self._goals = None if goals is None else goals.on(roof, self._cost)
        self._about = {"shape": options.shape, "compiled": engine.stats.compiled}
        self._seed = 0
        # Rows -> seconds per token.
        self._decodes: dict[int, float] = {}
        self._prefill_rate = 0.0

    async def prefill(self) -> None:
        """Measure one prompt alone; a first, uncounted one may compile kernels."""
        tokens, flops = self._size.prefill, self._cost.prefill_flops(self._size.prefill)
        taken = []
        for _ in range(1 + self._repeats):
            steps = await self._steps(1, tokens, 1)
            taken.append(steps[-1].device_end - steps[0].device_start)
        taken = taken[1:]
        measured = {
            "time": Figure.of("ms", [MS * seconds for seconds in taken]),
            "rate": Figure.of("tok/s", [tokens / seconds for seconds in taken]),
            "arithmetic": Figure.of("TFLOP/s", [flops / seconds / 1e12 for seconds in taken]),
        }
        name, goals = prefill(self._size), self._goals
        self._prefill_rate = measured["rate"].median
        self._record(name, measured)
        self._session.row(
            Row(
                name,
                "TFLOP/s",
                measured["arithmetic"].median,
                goal=None if goals is None else goals.prefill_tflops,
                limit=self._roof.flops / 1e12,
                rises=True,
                note=f"{measured['time'].median:.3g} ms",
            )
        )

    async def decode(self, rows: int) -> None:
        """Measure steps in which every row decodes and nothing else happens."""
        size = self._size
        windows = []
        for _ in range(self._repeats):
            steps = await self._steps(rows, size.prompt, size.output)
            windows.append(window(steps, rows, size.context, size.window))
        waits = [waiting(steps) for steps in windows]
        context = statistics.fmean(s.context_tokens for steps in windows for s in steps) / rows
        measured = {
            "inter_token": Figure.of("ms", [MS * seconds for seconds, _ in waits]),
            "bubble": Figure.of("%", [100 * share for _, share in waits]),
            "step": Figure.of(
                "ms", [MS * (s.device_end - s.device_start) for steps in windows for s in steps]
            ),
        }
        self._decodes[rows] = measured["inter_token"].median / MS
        limit = MS * self._cost.decode_seconds(rows, context, self._roof)
        self._record(inter_token(rows, size), measured, rows=rows, context=context, limit_ms=limit)
        goals = self._goals
        self._session.row(
            Row(
                inter_token(rows, size),
                "ms",
                measured["inter_token"].median,
                goal=None if goals is None else goals.inter_token_ms[rows],
                limit=limit,
            )
        )
        goal = None if goals is None else goals.bubble
        self._session.row(Row(bubble(rows), "%", measured["bubble"].median, goal=goal))

    async def offline(self) -> None:
        """Measure all requests at once, until the last token of the last of them."""
        (inputs, outputs), rows = self._size.offline, self._size.rows[-1]
        name, session = offline(self._size), self._session
        expected, left = self._expected_offline(), session.left - _PROFILE_SECONDS
        if expected > left:
            session.without([name], "not run", f"needs {expected:.0f} s, {left:.0f} s were left")
            return
        prompts = self._prompts(rows, inputs)
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        before, begun = self._engine.stats.preemptions, time.perf_counter()
        results = await asyncio.gather(
            *(self._engine.generate(prompt, params) for prompt in prompts)
        )
        seconds = time.perf_counter() - begun
        tokens = sum(len(result.token_ids) for result in results)
        limit = rows * outputs / self._cost.offline_seconds(rows, inputs, outputs, self._roof)
        preemptions = self._engine.stats.preemptions - before
        measured = {
            "output": Figure.of("tok/s", [tokens / seconds]),
            "time": Figure.of("s", [seconds]),
        }
        self._record(name, measured, preemptions=preemptions, limit=limit)
        # A device without the memory for all rows at once computes some of them twice.
        goal = None if self._goals is None or preemptions else self._goals.offline
        note = f"{seconds:.1f} s, {preemptions} preemptions"
        row = Row(name, "tok/s", tokens / seconds, goal=goal, limit=limit, rises=True, note=note)
        session.row(row)

    def _expected_offline(self) -> float:
        """Expected seconds of the offline batch, from the measured steps."""
        (inputs, outputs), rows = self._size.offline, self._size.rows[-1]
        if rows not in self._decodes or not self._prefill_rate:
            raise RuntimeError("without figures of prefill and decode nobody knows how long it is")
        # Assume the same distance from the theoretical limit as in the measured steps.
        worse = self._decodes[rows] / self._cost.decode_seconds(
            rows, self._size.context, self._roof
        )
        step = worse * self._cost.decode_seconds(rows, inputs + outputs / 2, self._roof)
        return _SLACK * (rows * inputs / self._prefill_rate + outputs * step)

    async def kernels(self) -> None:
        """Count the kernels of a decode step and of a prefill step with torch's profiler."""
        size, session = self._size, self._session
        layers = SHAPES[session.options.shape]["num_hidden_layers"]
        # The first profile in a process also initialises the profiler.
        await profiled(self._engine, lambda: self._steps(1, size.prefill, 2))
        one = await profiled(self._engine, lambda: self._steps(1, size.prefill, 1))
        more = await profiled(self._engine, lambda: self._steps(1, size.prefill, 1 + size.profiled))
        # Both profiles include the prefill step, so subtract it.
        found = {"decode": (more - one).per(size.profiled), "prefill": one}
        for figure, (name, kernels) in zip(_kernel_figures(), found.items(), strict=True):
            self._record(figure, kernels.figures(layers), phase=name)
            session.row(Row(figure, "", kernels.count / layers, note=_busy(kernels)))

    async def idle(self, rows: int) -> None:
        """Measure how long no kernel runs while rows decode, between and inside of steps.

        Events only show the time between steps. The profiler slows down launches, and there is a
        gap between any two kernels, so this is an upper bound.
        """
        steps = self._size.profiled
        share = await idle_share(self._engine, lambda: self._steps(rows, _SHORT_PROMPT, 1 + steps))
        name = without_kernel(rows)
        self._record(name, {"idle": Figure.of("%", [100 * share])}, rows=rows, steps=steps)
        self._session.row(Row(name, "%", 100 * share))

    async def _steps(self, rows: int, prompt: int, output: int) -> list[StepRecord]:
        """The steps of ``rows`` concurrent requests."""
        engine = self._engine
        since = engine.stats.num_steps
        client = engine_client(engine)
        await side_by_side(client, self._prompts(rows, prompt), output, rows)
        # Readers get the last tokens before the last step is recorded.
        await asyncio.sleep(0.01)
        return [step for step in engine.timeline if step.step_id > since]

    def _prompts(self, rows: int, length: int) -> list[list[int]]:
        self._seed += 1
        vocab_size = self._engine.model_info.vocab_size
        return random_prompts(rows, length, vocab_size, seed=self._seed)

    def _record(self, name: str, measured: dict[str, Figure], **details: object) -> None:
        self._session.record(name, measured, config=self._config, **self._about, **details)


def window(steps: Sequence[StepRecord], rows: int, context: float, length: int) -> list[StepRecord]:
    """``length`` consecutive steps with only ``rows`` decoding rows, nearest to ``context``.

    Raises
    ------
    RuntimeError
        There are no such steps.
    """
    found: list[tuple[float, list[StepRecord]]] = []
    for index in range(len(steps) - length + 1):
        part = list(steps[index : index + length])
        if all(step.decode_rows == step.num_tokens == rows for step in part):
            mean = sum(step.context_tokens for step in part) / (rows * length)
            found.append((abs(mean - context), part))
    if not found:
        raise RuntimeError(f"no {length} steps of {rows} decoding rows among {len(steps)}")
    return min(found, key=lambda pair: pair[0])[1]


def waiting(steps: Sequence[StepRecord]) -> tuple[float, float]:
    """Seconds from one step's end to the next one's, and the share of it without a step."""
    first, *others = steps
    wall = others[-1].device_end - first.device_end
    busy = sum(step.device_end - step.device_start for step in others)
    # The host sees an end some microseconds late, with some variation.
    return wall / len(others), max(0.0, 1 - busy / wall)


def _busy(kernels: Kernels) -> str:
    return f"{kernels.count:.0f} in the step, {MS * kernels.seconds:.3g} ms of them"
