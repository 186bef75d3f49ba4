"""Calls of a library's projection that are timed to choose among its ways (`ways`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from src.ops.cpu.calls import use_threads
from src.ops.cpu.ways import FORMATS
from src.ops.linear import STRIP, rounding_unit

_INPUTS: Final = 1024
_OUTPUTS: Final = 512  # Their weights stay in a core's cache, as those of a model may not.


def timed_calls(linear: Callable[..., torch.Tensor]) -> Callable[[int, int], Callable[[], object]]:
    """A function from a format (`ways.FORMATS`) and a number of rows to a call with random values.

    Calls of `linear`, the op, are of one thread. Weights are made once for each format.
    """
    weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(format: int, rows: int) -> Callable[[], object]:
        if format not in weights:
            weights[format] = _weights(*FORMATS[format])
        weight, scales = weights[format]
        random = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, _INPUTS, generator=random).to(torch.bfloat16)

        def call() -> object:
            use_threads(1)
            try:
                return linear(x, weight, scales, None)
            finally:
                use_threads(0)

        return call

    return prepare


def _weights(name: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of a format in strips, and their scales."""
    random = torch.Generator().manual_seed(group)
    is_int4 = name.startswith("int4")
    shape = (_OUTPUTS // STRIP, _INPUTS // (8 if is_int4 else 4), 4 * STRIP)
    low, high, dtype = (0, 256, torch.uint8) if is_int4 else (-128, 128, torch.int8)
    weight = torch.randint(low, high, shape, generator=random, dtype=dtype)
    if group == 0:
        return weight, torch.full((_OUTPUTS,), 1e-3)
    scales = torch.full((_OUTPUTS // STRIP, _INPUTS // group, STRIP), 1e-3, dtype=torch.bfloat16)
    assert rounding_unit(weight, scales) == group
    return weight, scales
