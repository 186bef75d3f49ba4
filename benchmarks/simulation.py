"""The accuracy of the simulator: simulated and real runs, in turns on the same machine.

    python -m benchmarks.simulation

Calibrations and real runs of an engine in this process take turns, so that changes of the machine
affect both. Each real run is predicted from the calibrations right before and after it, which use
other prompts and other loads. A second prediction, from the run's own steps, tells errors of the
model from changes of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import statistics
import time
from collections.abc import Sequence

import msgspec

from benchmarks.record import Figure, Recorder, add_common
from src import AsyncEngine, SamplingParams
from src.bench.figures import percentile
from src.bench.simulate.calibration import TIMELINE_STEPS, drive
from src.bench.simulate.fleet import simulate
from src.bench.simulate.outcome import Outcome
from src.bench.simulate.requests import RandomWorkload, SimulatedRequest
from src.bench.simulate.step_cost import StepCost, fit
from src.core.config import Config
from src.core.settings import load_config
from src.core.steps import StepRecord
from src.core.views import TimelineView
from src.engine.scheduling.scheduler import SchedulerLimits

# Rate of the steady load, as a fraction of the throughput with all requests at once.
STEADY = 0.6


class Seen(msgspec.Struct, frozen=True):
    """Figures of one run, real or predicted: requests per second, and seconds."""

    throughput: float
    ttft_median: float
    ttft_p99: float
    tpot_median: float


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/demo.toml", metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="per run")
    parser.add_argument("--calibrate", type=float, default=8.0, metavar="S", help="seconds each")
    add_common(parser, repeats=5)
    return parser.parse_args()


def configuration(options: argparse.Namespace) -> Config:
    overrides = [("observability.timeline_steps", str(TIMELINE_STEPS)), ("compile.startup", "off")]
    overrides += [("observability.stats_interval", "0"), ("observability.log_level", "warning")]
    # The simulator knows nothing of drafts.
    overrides.append(("speculation.method", "off"))
    for assignment in options.overrides:
        name, _, value = assignment.partition("=")
        overrides.append((name, value))
    return load_config(options.config, overrides=overrides)


async def real_run(
    engine: AsyncEngine, requests: Sequence[SimulatedRequest], seed: str
) -> tuple[Seen, list[StepRecord]]:
    """Send requests with new prompts of these lengths to a real engine at these times."""
    source = random.Random(seed)
    vocab_size = engine.model_info.vocab_size
    prompts = [[source.randrange(vocab_size) for _ in range(r.prompt_len)] for r in requests]
    last = engine.timeline.last
    begin = time.monotonic() + 0.05

    async def one(request: SimulatedRequest, prompt: list[int]) -> tuple[float, float, float]:
        await asyncio.sleep(begin + request.at - time.monotonic())
        params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
        sent, first = time.monotonic(), 0.0
        async for _ in engine.stream(prompt, params):
            first = first or time.monotonic()
        return sent, first, time.monotonic()

    asked = [one(request, prompt) for request, prompt in zip(requests, prompts, strict=True)]
    answers = await asyncio.gather(*asked)
    seconds = max(end for _, _, end in answers) - min(sent for sent, _, _ in answers)
    ttfts = [first - sent for sent, first, _ in answers]
    tpots = [
        (end - first) / (request.output_len - 1)
        for (_, first, end), request in zip(answers, requests, strict=True)
        if request.output_len > 1
    ]
    seen = Seen(
        throughput=len(answers) / seconds,
        ttft_median=statistics.median(ttfts),
        ttft_p99=percentile(ttfts, 99),
        tpot_median=statistics.median(tpots),
    )
    return seen, engine.inspector.timeline(after=last.step_id if last else 0).steps


def seen_of(outcome: Outcome) -> Seen:
    return Seen(
        outcome.request_throughput,
        outcome.ttft.median,
        outcome.ttft.percentiles[99],
        outcome.tpot.median,
    )


def cost_of(views: Sequence[TimelineView]) -> StepCost:
    steps = [step for view in views for step in view.steps]
    submits = [track.queued - track.arrival for view in views for track in view.requests]
    return fit(steps, statistics.median(submits))


async def measure(
    engine: AsyncEngine, limits: SchedulerLimits, depth: int, options: argparse.Namespace
) -> dict[str, list[tuple[Seen, Seen, Seen]]]:
    """Per load: the measured figures, the prediction, and that from the run's own steps."""

    def predict(requests: Sequence[SimulatedRequest], cost: StepCost) -> Seen:
        return seen_of(simulate(requests, limits, cost, depth=depth))

    await drive(engine, 2.0)
    before = await drive(engine, options.calibrate)
    lengths = {"input_len": (16, 256), "output_len": (16, 96)}
    probe = RandomWorkload(count=options.requests, **lengths)
    rate = STEADY * predict(list(probe.requests(math.inf)), cost_of([before])).throughput
    loads = {"steady": rate, "all at once": math.inf}
    found: dict[str, list[tuple[Seen, Seen, Seen]]] = {name: [] for name in loads}
    for repeat in range(options.repeats):
        for name, load in loads.items():
            workload = RandomWorkload(count=options.requests, seed=100 + repeat, **lengths)
            requests = list(workload.requests(load))
            real, steps = await real_run(engine, requests, seed=f"{repeat}, {name}")
            after = await drive(engine, options.calibrate, seed=repeat)
            predicted = predict(requests, cost_of([before, after]))
            own = cost_of([before, after]).submit
            found[name].append((real, predicted, predict(requests, fit(steps, own))))
            before = after
            show(f"{name}, {load:.1f} per second", found[name][-1])
    return found


def show(name: str, seen: tuple[Seen, Seen, Seen]) -> None:
    print(f"{name} (load {os.getloadavg()[0]:.1f})", flush=True)
    for field in Seen.__struct_fields__:
        real, predicted, own = (getattr(one, field) for one in seen)
        off, own_off = 100 * (predicted / real - 1), 100 * (own / real - 1)
        print(
            f"  {field:<12} {real:8.3f} real {predicted:8.3f} predicted {off:+6.1f} %"
            f"  (from its own steps {own_off:+6.1f} %)",
            flush=True,
        )


def figures(runs: Sequence[tuple[Seen, Seen, Seen]]) -> dict[str, Figure]:
    found = {}
    for field in Seen.__struct_fields__:
        unit, factor = ("req/s", 1.0) if field == "throughput" else ("ms", 1000.0)
        real = [factor * getattr(run[0], field) for run in runs]
        found[f"{field}, real"] = Figure.of(unit, real)
        for name, place in (("predicted", 1), ("predicted from its own steps", 2)):
            values = [factor * getattr(run[place], field) for run in runs]
            found[f"{field}, {name}"] = Figure.of(unit, values)
            errors = [100 * (value / true - 1) for value, true in zip(values, real, strict=True)]
            found[f"{field}, {name}, off by"] = Figure.of("%", errors)
    return found


async def run(options: argparse.Namespace) -> None:
    from src.ops.build.kernels import ensure_built

    config = configuration(options)
    recorder = Recorder("simulation", save=not options.no_save)
    await asyncio.to_thread(ensure_built, wait=True)
    async with AsyncEngine.open(config) as engine:
        pool = await engine.inspector.pool()
        limits = SchedulerLimits.of(
            config,
            device_type=engine.model_info.device_type,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            windows=tuple(pool.windows),
            content_key="",
            max_model_len=engine.model_info.max_model_len,
        )
        depth = config.scheduler.pipeline_depth
        for name, runs in (await measure(engine, limits, depth, options)).items():
            recorder.add(
                name,
                figures(runs),
                config=config,
                requests=options.requests,
                calibrate_seconds=options.calibrate,
                load_after=round(os.getloadavg()[0], 2),
            )


if __name__ == "__main__":
    asyncio.run(run(parse()))
