"""Mixture of experts on the CPU: this project's kernel, torch's grouped product, and a loop.

    python -m benchmarks.experts
    python -m benchmarks.experts --tokens 1 4 --experts 64 --dtypes bfloat16

`kernel` has row-major weights, `strips` has bfloat16 packed in strips, `int8` is quantized and in
strips; `grouped` is `torch.nn.functional.grouped_mm` between a sort and a gather; `loop` is the
reference, one expert after the other. They take turns in random order on the same tokens and
choices. Choices are drawn anew for every call, and there are enough layers to exceed the caches, so
a single token reads its experts from memory. Figures are the time of a call, and the bytes of
chosen experts and the operations per time. With one thread, the default, time is that thread's CPU
time, which other programs affect less.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.record import Figure, Recorder, add_common
from src.ops import EXPERTS
from src.ops.build.kernels import ensure_built, kernel_library
from src.ops.matrix import Encoding, Matrix, Tiling, to_quantized_strips, to_strips
from src.ops.projections.experts import Experts, grouped

_BEYOND_CACHES: Final = 2**28  # bytes of all layers
_PASS_SECONDS: Final = 0.05  # minimal duration of a pass
_MOST_CALLS: Final = 64
_CHOSEN: Final = {8: 2, 64: 8}
Call = Callable[[int, "Step"], object]


class Step:
    """Tokens of a call, and their chosen experts."""

    def __init__(self, tokens: int, experts: int, hidden: int, dtype: torch.dtype) -> None:
        self.hidden = torch.randn(tokens, hidden).to(dtype)
        scores = torch.randn(tokens, experts).softmax(dim=-1)
        self.weights, self.ids = scores.topk(_CHOSEN[experts], dim=-1)

    def cost(self, gate_up: Tensor, down: Tensor) -> tuple[int, int]:
        """Bytes and operations, for any layout of the weights."""
        cost = EXPERTS.cost(*self.call(Matrix.plain(gate_up), Matrix.plain(down)).flat())
        return cost.bytes, cost.flops

    def call(self, gate_up: Matrix, down: Matrix) -> Experts:
        """The call of a layer with these weights."""
        return Experts(self.hidden, gate_up, down, self.weights, self.ids)


class Layer:
    """The weights of a layer in every layout."""

    def __init__(self, experts: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        # Of realistic size: the exact bits do not affect time, but denormal products would.
        self.gate_up = (torch.randn(experts, 2 * intermediate, hidden) * hidden**-0.5).to(dtype)
        self.down = (torch.randn(experts, hidden, intermediate) * intermediate**-0.5).to(dtype)
        rows = (self.gate_up, self.down)
        self.strips = (
            [
                Matrix.plain(torch.stack([to_strips(each) for each in held]), Tiling.TILES)
                for held in rows
            ]
            if dtype == torch.bfloat16
            else None
        )
        self.int8 = [_int8(held) for held in rows]


def _int8(held: Tensor) -> Matrix:
    scales = held.float().abs().amax(dim=2) / 127
    values = (held.float() / scales[:, :, None]).round().to(torch.int8)
    strips = [to_quantized_strips(*each)[0] for each in zip(values, scales, strict=True)]
    encoding = Encoding("int8", None, torch.float32)
    return Matrix(torch.stack(strips), encoding, scales, tiling=Tiling.TILES)


def contestants(layers: list[Layer]) -> dict[str, Call]:
    def kernel(index: int, step: Step) -> Tensor:
        layer = layers[index % len(layers)]
        return run(step, Matrix.plain(layer.gate_up), Matrix.plain(layer.down))

    def strips(index: int, step: Step) -> Tensor:
        held = layers[index % len(layers)].strips
        assert held is not None
        return run(step, *held)

    def int8(index: int, step: Step) -> Tensor:
        return run(step, *layers[index % len(layers)].int8)

    def run(step: Step, gate_up: Matrix, down: Matrix) -> Tensor:
        library = kernel_library()
        assert library is not None
        result: Tensor = library.experts(*step.call(gate_up, down).flat())
        return result

    def by_torch(index: int, step: Step) -> Tensor:
        layer = layers[index % len(layers)]
        return grouped(step.hidden, layer.gate_up, layer.down, step.weights, step.ids)

    def loop(index: int, step: Step) -> Any:
        layer = layers[index % len(layers)]
        call = step.call(Matrix.plain(layer.gate_up), Matrix.plain(layer.down))
        return EXPERTS.reference(*call.flat())

    calls: dict[str, Call] = {"kernel": kernel}
    if layers[0].strips is not None:
        calls["strips"] = strips
    return calls | {"int8": int8, "grouped": by_torch, "loop": loop}


def seconds_of(call: Call, steps: list[Step], turn: Iterator[int]) -> float:
    """Mean seconds of a call, over enough calls to be measurable."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    for done, step in enumerate(itertools.cycle(steps), 1):
        call(next(turn), step)
        if clock() - begun > _PASS_SECONDS or done == _MOST_CALLS:
            return (clock() - begun) / done
    raise AssertionError


def measure(layers: list[Layer], steps: list[Step], repeats: int) -> dict[str, Figure]:
    calls = contestants(layers)
    turn = itertools.count()
    costs = [step.cost(layers[0].gate_up, layers[0].down) for step in steps]
    num_bytes, flops = (sum(each) / len(steps) for each in zip(*costs, strict=True))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for call in calls.values():
            call(next(turn), steps[0])
        for _ in range(repeats):
            for name in random.sample(list(calls), len(calls)):
                taken[name].append(seconds_of(calls[name], steps, turn))
    figures = {}
    for name, values in taken.items():
        figures[name] = Figure.of("ms", [1e3 * value for value in values])
        if name != "int8":
            figures[f"{name}, read"] = Figure.of("GB/s", [num_bytes / 1e9 / v for v in values])
        figures[f"{name}, computed"] = Figure.of("GFLOP/s", [flops / 1e9 / v for v in values])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=(1, 4, 32, 512, 2048))
    parser.add_argument("--experts", nargs="+", type=int, choices=_CHOSEN, default=tuple(_CHOSEN))
    parser.add_argument("--dtypes", nargs="+", default=("bfloat16", "float32"))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    add_common(parser, repeats=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    status = ensure_built(wait=True)
    recorder = Recorder("experts", save=not options.no_save)
    for experts, name in itertools.product(options.experts, options.dtypes):
        dtype = getattr(torch, name)
        sizes = (options.hidden, options.intermediate)
        of_a_layer = 3 * experts * sizes[0] * sizes[1] * dtype.itemsize
        layers = [Layer(experts, *sizes, dtype) for _ in range(-(-_BEYOND_CACHES // of_a_layer))]
        for tokens in options.tokens:
            steps = [Step(tokens, experts, sizes[0], dtype) for _ in range(8)]
            recorder.add(
                f"{tokens} tokens, {_CHOSEN[experts]} of {experts} experts, {name}",
                measure(layers, steps, options.repeats),
                kernels=status,
                threads=torch.get_num_threads(),
                hidden=sizes[0],
                intermediate=sizes[1],
            )


if __name__ == "__main__":
    main()
