"""What this machine can do at most, measured where and when the figures are.

A kernel is as fast as it can be when it moves its bytes at the machine's bandwidth or does its
arithmetic at the machine's rate, whichever takes longer (S. Williams, A. Waterman, D. Patterson,
"Roofline", CACM 2009). Inputs that stay in a cache from one call to the next can go over 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from src.ops import Cost

_REPEATS = 7


@dataclass(frozen=True)
class Roofline:
    """Bytes per second that can be read, floating point operations per second."""

    bandwidth: float
    flops: float

    def seconds(self, cost: Cost) -> float:
        """The least time for this cost."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.flops)


def measure(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Reading a tensor far larger than any cache, and a matrix product in ``dtype``."""
    on_cuda = device.type == "cuda"
    count = 2**30 if on_cuda else 2**26
    data = torch.ones(count, dtype=torch.float32, device=device)
    side = 8192 if on_cuda else 768
    # Not ones: a GPU that multiplies what never changes needs less power, and clocks higher.
    left = torch.randn(side, side, device=device).to(dtype)
    return Roofline(
        bandwidth=4 * count / best_seconds(data.sum, device),
        flops=2 * side**3 / best_seconds(lambda: left @ left, device),
    )


def best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few runs after a first one: what the machine can, not what it was at."""
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
