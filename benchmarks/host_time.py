"""CPU time that the host spends on a decode step beside the kernels, phase by phase.

    python -m benchmarks.host_time                  # 32 rows of 7 M and of 0.35 B parameters
    python -m benchmarks.host_time --shape 7m --rows 64

The step timeline only has wall-clock times, which other programs affect, and it does not separate
the device thread's Python from the kernels. So CPU-time clocks are put around methods (`PHASES`). A
phase does not include phases inside it; its own clock adds a microsecond or two. The timeline
determines which steps count: those in which every row decodes.

`plan`, `launch` and `commit` run on the event loop, in parallel with the previous step's forward
pass. The other phases run on the device thread between forward passes: `apply` (changes of the plan
to its rows; new blocks of all rows fall into one step), `inputs` (around the kernels' call), `read`
(tokens into a result) and `hand_over` (the rest, including the way back to the event loop).
Delivery to the readers is not included; see `benchmarks.loop_time`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.clocks import Clocks
from benchmarks.load import engine_client, random_prompts, side_by_side
from benchmarks.record import Recorder, add_common, figures_of, percentile
from benchmarks.shapes import SHAPES, write_checkpoint
from src import AsyncEngine, Config
from src.core.collector import freeze_collector, thaw_collector
from src.core.settings import load_config
from src.core.steps import StepRecord
from src.ops.build.kernels import ensure_built

US = 1e6
# In the order of execution.
PHASES = ("plan", "launch", "apply", "inputs", "read", "hand_over", "commit")
# The call into the kernel library, which does not count as host time.
_KERNELS = "kernels"
_PROMPT_LEN = 16
_PERCENTS = {"p50": 0.5, "p99": 0.99}
# `device` is wall-clock time, from the beginning of a step on the device thread to its end.
FIGURES = {
    f"{name}_{percent}": "us" for name in ("total", *PHASES, "device") for percent in _PERCENTS
}


class Step(NamedTuple):
    """CPU seconds of each phase, and the step's record in the timeline."""

    phases: dict[str, float]
    record: StepRecord

    @property
    def total(self) -> float:
        return sum(self.phases[name] for name in PHASES)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=("7m", "0.35b"))
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="that decode at once")
    parser.add_argument("--steps", type=int, default=256, metavar="N", help="per repeat")
    add_common(parser, repeats=5)
    return parser.parse_args(arguments)


def configuration(directory: Path, rows: int) -> Config:
    overrides = [
        ("model.path", str(directory)),
        ("model.load_format", "dummy"),
        ("model.max_model_len", "2048"),
        ("scheduler.max_num_seqs", str(max(64, rows))),
        # Large enough that no request is preempted.
        ("cache.memory_bytes", str(512 * 2**20)),
        ("device.type", "cpu"),
        ("compile.startup", "wait"),
    ]
    return load_config(None, overrides=overrides)


@contextlib.contextmanager
def clocks() -> Iterator[Clocks]:
    """A clock around each phase of a step; every one is called once per step."""
    from src.engine.execution.row_owners import RowOwners
    from src.engine.execution.step_computer import StepComputer
    from src.engine.execution.worker import Worker
    from src.engine.loop import EngineLoop
    from src.engine.scheduling.scheduler import Scheduler
    from src.ops.runtime.step import CompiledStep

    found = Clocks()
    # With nothing to plan, nothing is launched, so there is no step.
    found.measure("plan", Scheduler, "schedule", keeps=lambda plan: plan is not None)
    found.measure("launch", EngineLoop, "_launch", keeps=bool)
    found.measure("hand_over", Worker, "_run")
    found.measure("apply", RowOwners, "apply")
    found.measure("inputs", StepComputer, "compute")
    found.measure(_KERNELS, CompiledStep, "_call")
    found.measure("read", Worker, "_read")
    found.measure("commit", EngineLoop, "_commit")
    try:
        yield found
    finally:
        found.close()


async def steps_of(
    engine: AsyncEngine, found: Clocks, rows: int, steps: int, seed: int
) -> list[Step]:
    """At least ``steps`` steps with exactly ``rows`` decoding rows.

    Raises
    ------
    RuntimeError
        The numbers of steps and of measurements differ.
    """
    found.clear()
    last = engine.timeline.last
    before = 0 if last is None else last.step_id
    prompts = random_prompts(rows, _PROMPT_LEN, engine.model_info.vocab_size, seed=seed)
    # Prompts take steps of their own, and rows may begin to decode at different times.
    await side_by_side(engine_client(engine), prompts, steps + rows, rows)
    # Clients get the last tokens before the device thread has finished the last step.
    await asyncio.wrap_future(engine._loaded.worker.call(lambda: None))
    records = [record for record in engine.timeline if record.step_id > before]
    columns = [found.values[name] for name in (*PHASES, _KERNELS)]
    if any(len(values) != len(records) for values in columns):
        counts = {name: len(values) for name, values in found.values.items()}
        raise RuntimeError(f"{len(records)} steps, but the clocks went {counts} times")
    decoding = [
        Step(dict(zip((*PHASES, _KERNELS), values, strict=True)), record)
        for record, *values in zip(records, *columns, strict=True)
        if record.decode_rows == rows and not record.prefill_tokens
    ]
    if len(decoding) < steps:
        raise RuntimeError(f"expected {steps} steps of {rows} decoding rows, got {len(decoding)}")
    return decoding


def figures(steps: Sequence[Step]) -> dict[str, float]:
    """The values of ``FIGURES`` for one repeat."""
    found = {name: [step.phases[name] for step in steps] for name in PHASES}
    found["total"] = [step.total for step in steps]
    found["device"] = [step.record.device_end - step.record.device_start for step in steps]
    return {
        f"{name}_{percent}": US * percentile(values, fraction)
        for name, values in found.items()
        for percent, fraction in _PERCENTS.items()
    }


async def measure(config: Config, rows: int, steps: int, repeats: int) -> list[dict[str, float]]:
    """The values of ``FIGURES`` per repeat, of an engine with compiled code.

    Raises
    ------
    RuntimeError
        The code could not be compiled, so Python and kernels cannot be told apart.
    """
    async with AsyncEngine.open(config) as engine:
        if not engine.stats.compiled:
            raise RuntimeError("the model goes on uncompiled")
        # As in a server's process.
        freeze_collector()
        try:
            with clocks() as found:
                await steps_of(engine, found, rows, min(16, steps), seed=0)
                return [
                    figures(await steps_of(engine, found, rows, steps, seed=repeat + 1))
                    for repeat in range(repeats)
                ]
        finally:
            thaw_collector()


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    recorder = Recorder("host_time", save=not options.no_save)
    kernels = ensure_built(wait=True)
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as folder:
            directory = write_checkpoint(Path(folder), shape)
            config = configuration(directory, options.rows)
            repeats = asyncio.run(measure(config, options.rows, options.steps, options.repeats))
        recorder.add(
            f"{shape}, {options.rows} decoding rows, processor time of the host per step",
            figures_of(FIGURES, repeats),
            config=config,
            kernels=kernels,
            shape=shape,
            rows=options.rows,
            steps=options.steps,
        )


if __name__ == "__main__":
    main()
