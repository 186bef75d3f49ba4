"""A machine's limits, measured: what memory gives and what products take.

A kernel is optimal if it moves its bytes at the machine's bandwidth or does its arithmetic at the
machine's rate, whichever takes longer (S. Williams, A. Waterman, D. Patterson, "Roofline", CACM
2009). If inputs stay in a cache between calls, a figure can exceed 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from src.ops import Cost

_REPEATS = 7
# Elements of the tensor that is read on the host, far more than any cache holds.
_HOST_ELEMENTS = 2**26


@dataclass(frozen=True)
class Roofline:
    """Read bandwidth in bytes per second, and floating-point operations per second."""

    bandwidth: float
    flops: float

    def seconds(self, cost: Cost) -> float:
        """Minimal time for this cost."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.flops)


def measure(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Measure by reading a tensor far larger than any cache, and by a product in ``dtype``."""
    on_cuda = device.type == "cuda"
    count = 2**30 if on_cuda else _HOST_ELEMENTS
    data = torch.ones(count, dtype=torch.float32, device=device)
    side = 8192 if on_cuda else 768
    # Random, because with constant data a GPU needs less power and clocks higher.
    left = torch.randn(side, side, device=device).to(dtype)
    return Roofline(
        bandwidth=4 * count / best_seconds(data.sum, device),
        flops=2 * side**3 / best_seconds(lambda: left @ left, device),
    )


def best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few runs after a warm-up, as an estimate of what the machine can do."""
    run()
    return min(_seconds(run, device) for _ in range(_REPEATS))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1000
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
