"""Calls of a library's projection that are timed to choose among its ways (`ways`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from src.ops.build.ways import FORMATS, Format
from src.ops.matrix import STRIP, Encoding, Matrix, Tiling
from src.ops.projections.linear import Linear
from src.ops.runtime.calls import use_threads

_INPUTS: Final = 1024
_OUTPUTS: Final = 1024  # So a turn of all ways takes a second or two, once per library.


def timed_calls(linear: Callable[..., torch.Tensor]) -> Callable[[int, int], Callable[[], object]]:
    """A function from a format (`ways.FORMATS`) and a number of rows to a call with random values.

    Calls of `linear`, the op, are of one thread. Weights of a format are kept until another one is
    asked for.
    """
    matrices: dict[int, Matrix] = {}

    def prepare(format: int, rows: int) -> Callable[[], object]:
        if format not in matrices:
            matrices.clear()  # They are asked for one after the other.
            matrices[format] = _matrix(FORMATS[format])
        matrix = matrices[format]
        random = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, _INPUTS, generator=random).to(torch.bfloat16)
        arguments = Linear(x, matrix, None).flat()

        def call() -> object:
            use_threads(1)
            try:
                return linear(*arguments)
            finally:
                use_threads(0)

        return call

    return prepare


def _matrix(format: Format) -> Matrix:
    """A matrix in tiles."""
    random = torch.Generator().manual_seed(0)
    encoding = Encoding(
        format.number,
        format.group,
        torch.float32 if format.group is None else torch.bfloat16,
        format.has_offsets,
    )
    traits = encoding.traits
    shape = (_OUTPUTS // STRIP, _INPUTS * traits.bits // 32, 4 * STRIP)
    low, high = (0, 256) if traits.dtype == torch.uint8 else (-128, 128)
    values = torch.randint(low, high, shape, generator=random, dtype=traits.dtype)
    if format.group is None:
        scales = torch.full((_OUTPUTS,), 1e-3)
    else:
        of_groups = (_OUTPUTS // STRIP, _INPUTS // format.group, STRIP)
        scales = torch.full(of_groups, 1e-3, dtype=torch.bfloat16)
    offsets = scales if format.has_offsets else None
    return Matrix(values, encoding, scales, offsets, tiling=Tiling.TILES)
