"""The device half on a GPU, in one command::

    python -m benchmarks.gpu                # kernels, then prefill and decode of an 8B shape
    python -m benchmarks.gpu --device cpu --shape tiny --quick    # tries the benchmark itself out

Kernels are checked against their references before they are timed. The model has weights from a
seed; its steps are planned by the engine's scheduler and run by the engine's runner, two in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.load import MS, random_prompts
from benchmarks.record import Figure, Recorder, add_common, figures_of
from benchmarks.roofline import Roofline, best_seconds, measure
from benchmarks.shapes import SHAPES, write_checkpoint
from src.core.config import Config
from src.core.plan import StepPlan
from src.core.request import Request
from src.core.sampling_params import SamplingParams
from src.core.settings import load_config
from src.engine.in_flight import InFlight
from src.engine.startup import EngineParts, build_engine
from src.ops import GUMBEL_ARGMAX, PAGED_ATTENTION, Op
from src.ops.cpu.build import ensure_built

_DEPTH = 2
_HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 64}


def op_cases(*, quick: bool) -> dict[str, tuple[Op, dict[str, Any]]]:
    """What a decoder of 8 billion parameters asks of the ops, in its dtype."""
    scale = 16 if quick else 1
    attention = {**_HEADS, "dtype": torch.bfloat16}
    return {
        f"decode, {rows} rows of {length // scale}": (
            PAGED_ATTENTION,
            {"rows": [(1, length // scale)] * rows, **attention},
        )
        for rows, length in ((1, 8192), (8, 4096), (64, 2048))
    } | {
        f"prefill of {4096 // scale}": (
            PAGED_ATTENTION,
            {"rows": [(4096 // scale, 4096 // scale)], **attention},
        ),
        f"chunk of {2048 // scale} after {6144 // scale}": (
            PAGED_ATTENTION,
            {"rows": [(2048 // scale, 8192 // scale)], **attention},
        ),
        f"sample {64 // scale} of 128256": (
            GUMBEL_ARGMAX,
            {"rows": 64 // scale, "vocab_size": 128_256, "temperature": 1.0},
        ),
    }


def check(op: Op, device: torch.device, case: dict[str, Any]) -> None:
    """The kernel against the reference on the same inputs.

    Raises
    ------
    RuntimeError
        They disagree.
    """
    expected, got = op.build(str(device), **case), op.build(str(device), **case)
    wanted, answer = op.reference(*expected), op.overload(*got)
    if op is PAGED_ATTENTION:
        # The output buffer; the argument before the scale.
        pairs = [(e, g) for e, g in zip(expected, got, strict=True) if torch.is_tensor(e)]
        wanted, answer = pairs[-1]
        error = float((wanted.float() - answer.float()).abs().max())
        if not error < 0.05:
            raise RuntimeError(f"{op.name} differs from its reference by {error:g}")
    elif float((wanted == answer).float().mean()) < 0.98:
        # Equal but for ties within float rounding.
        raise RuntimeError(f"{op.name} chooses other tokens than its reference")


def measure_ops(recorder: Recorder, device: torch.device, roof: Roofline, *, quick: bool) -> None:
    for name, (op, case) in op_cases(quick=quick).items():
        check(op, device, case)
        arguments = op.build(str(device), **case)
        cost = op.cost(*arguments)
        seconds = best_seconds(partial(op.overload, *arguments), device)
        figures = {
            "time": Figure.of("us", [1e6 * seconds]),
            "bandwidth": Figure.of("GB/s", [cost.bytes / seconds / 1e9]),
            "arithmetic": Figure.of("TFLOP/s", [cost.flops / seconds / 1e12]),
            "fraction_of_roofline": Figure.of("", [roof.seconds(cost) / seconds]),
        }
        recorder.add(f"{op.name}, {name}", figures, kernel=op.active(device.type).name)


class Steps:
    """Drives scheduler and runner until all requests have ended, without streams and text."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._keys = iter(range(10**9))

    async def run(self, prompts: list[list[int]], output_len: int) -> list[tuple[StepPlan, float]]:
        """Every step's plan with the seconds that the device took for it."""
        scheduler, runner = self._parts.scheduler, self._parts.runner
        unseen: dict[int, Request] = {}
        for prompt in prompts:
            request = Request(
                key=next(self._keys),
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=0),
                max_tokens=output_len,
            )
            unseen[request.key] = request
            scheduler.add(request)
        in_flight: deque[InFlight] = deque()
        steps: list[tuple[StepPlan, float]] = []
        ended: list[int] = []
        while scheduler.has_work:
            while len(in_flight) < _DEPTH and (plan := scheduler.schedule()) is not None:
                admitted = [unseen.pop(i.request_key) for i in plan.installs]
                in_flight.append(runner.launch(plan, admitted, ended))
                ended = []
            step = in_flight.popleft()
            events = scheduler.commit(await step.future)
            ended += [event.key for event in events if event.finish_reason is not None]
            steps.append((step.plan, step.times.device_end - step.times.device_start))
        return steps


def decode_seconds(steps: list[tuple[StepPlan, float]], rows: int) -> list[float]:
    """Of the steps in which every row decodes and nothing else happens."""
    return [s for plan, s in steps if plan.num_tokens == len(plan.rows) == rows]


async def measure_model(
    recorder: Recorder, config: Config, options: argparse.Namespace, roof: Roofline
) -> None:
    parts = await asyncio.to_thread(build_engine, config, lambda *_: None)
    try:
        steps, vocab_size = Steps(parts), parts.info.vocab_size
        model = {"shape": options.shape, "compiled": parts.runner.compiled}
        short, long = (16, 64) if options.quick else (128, 4096)
        await steps.run(random_prompts(2, short, vocab_size, seed=9), 4)

        runs = []
        for repeat in range(options.repeats):
            taken = await steps.run(random_prompts(1, long, vocab_size, seed=10 + repeat), 1)
            seconds = sum(s for _, s in taken)
            runs.append({"prefill": long / seconds, "time": MS * seconds})
        units = {"prefill": "tok/s", "time": "ms"}
        recorder.add(f"prefill of {long}", figures_of(units, runs), config=config, **model)

        weights = weight_bytes(options.shape)
        for rows in (1, 2) if options.quick else (1, 8, 64):
            prompts = random_prompts(rows, short, vocab_size, seed=20 + rows)
            ran = await steps.run(prompts, 16 if options.quick else 128)
            decodes = decode_seconds(ran, rows)
            figures = {
                "step": Figure.of("ms", [MS * s for s in decodes]),
                "decode": Figure.of("tok/s", [rows / s for s in decodes]),
                "weights_read": Figure.of(
                    "of bandwidth", [weights / s / roof.bandwidth for s in decodes]
                ),
            }
            recorder.add(f"decode, {rows} rows", figures, config=config, **model)
    finally:
        await asyncio.to_thread(parts.runner.close)


def weight_bytes(shape: str) -> int:
    """Bytes of weights that a decode step reads, in bfloat16; of the embedding only the head."""
    s = SHAPES[shape]
    heads = s["num_attention_heads"] + 2 * s["num_key_value_heads"]
    attention = s["head_dim"] * s["hidden_size"] * (heads + s["num_attention_heads"])
    mlp = 3 * s["hidden_size"] * s["intermediate_size"]
    total = s["num_hidden_layers"] * (attention + mlp) + s["vocab_size"] * s["hidden_size"]
    return int(2 * total)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--quick", action="store_true", help="small inputs: figures mean nothing")
    add_common(parser, repeats=5)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    recorder = Recorder("gpu", save=not options.no_save)
    if options.device == "cpu":
        ensure_built(wait=True)
    # A CPU without bfloat16 units is faster in float32, which is what its kernels compute in.
    roof = measure(device, torch.bfloat16 if options.device == "cuda" else torch.float32)
    ceiling = {
        "bandwidth": Figure.of("GB/s", [roof.bandwidth / 1e9]),
        "arithmetic": Figure.of("TFLOP/s", [roof.flops / 1e12]),
    }
    name = torch.cuda.get_device_name(device) if options.device == "cuda" else "cpu"
    recorder.add("this device at most", ceiling, device=name)
    measure_ops(recorder, device, roof, quick=options.quick)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
        config = load_config(
            overrides=[
                ("model.path", str(write_checkpoint(Path(directory), options.shape))),
                ("model.load_format", "dummy"),
                ("device.type", options.device),
                ("cache.enable_prefix_caching", "false"),
                ("compile.startup", "wait"),
                ("compile.enforce_eager", str(options.eager).lower()),
                ("scheduler.max_num_batched_tokens", "4096"),
            ]
        )
        asyncio.run(measure_model(recorder, config, options, roof))
    return 0


if __name__ == "__main__":
    sys.exit(main())
