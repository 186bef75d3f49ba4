"""What a kernel of the CPU is told of a matrix, and which matrices it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from src.ops.matrix import INT4_RUN, STRIP, Matrix, Tiling
from src.ops.runtime.calls import DTYPES

_POWERS: Final = 3  # kPowers
_GROUP_DTYPES: Final = {**DTYPES, torch.uint8: _POWERS}
_VALUES_OF_A_SLICE: Final = {torch.int8: 4, torch.uint8: 8, torch.bfloat16: 2}

Reading = Callable[[Tensor, int, Tensor | None, Tensor | None], tuple[int, ...]]
"""From values, kind, scales and offsets: each size of the matrix, its group and its group dtype."""


def reader_of(dims: int) -> Reading:
    """A function that reads a matrix (2 dimensions), or a stack of them (3).

    It raises a `ValueError` if the matrix is none that a kernel reads. That values without scales
    are of the inputs' dtype is for the caller to see to.
    """

    def read(
        values: Tensor, kind: int, scales: Tensor | None, offsets: Tensor | None
    ) -> tuple[int, ...]:
        matrix = Matrix.of_kind(kind, values, scales, offsets)
        is_tiled = matrix.tiling is Tiling.TILES
        if values.dim() != dims + is_tiled or not values.is_contiguous():
            raise ValueError(
                f"expected contiguous values of {'a matrix' if dims == 2 else 'a stack'} in "
                f"{matrix.tiling.value}, got {_form(values)} with strides {values.stride()}"
            )
        stacked = () if dims == 2 else values.shape[:1]
        outputs, inputs = matrix.outputs, matrix.inputs
        if is_tiled:
            _check_tiles(values, scales, stacked, inputs, outputs)
        if scales is None:
            if offsets is not None:
                raise ValueError("expected no offsets without scales")
            return (*stacked, outputs, inputs, 0, 0)
        if inputs % INT4_RUN:
            # Loading a model decodes what this refuses.
            raise ValueError(
                f"no kernel multiplies {matrix.encoding} with {inputs} inputs, no multiple of "
                f"{INT4_RUN}"
            )
        group = matrix.encoding.group
        if group is None:
            # Of rows, kernels read float32.
            is_whole = scales.dtype == torch.float32 and scales.shape == (*stacked, outputs)
        elif group == 0 or inputs % group:
            is_whole = False
        elif is_tiled:
            is_whole = scales.shape == (*stacked, outputs // STRIP, inputs // group, STRIP)
        else:
            is_whole = scales.shape == (*stacked, outputs, inputs // group)
        if not (is_whole and scales.is_contiguous() and scales.dtype in _GROUP_DTYPES):
            raise ValueError(
                f"expected contiguous scales of all rows or groups, got {_form(scales)} for values "
                f"{_form(values)}"
            )
        if offsets is not None and not (
            group is not None
            and offsets.shape == scales.shape
            and offsets.dtype == scales.dtype
            and offsets.is_contiguous()
        ):
            raise ValueError(
                "expected contiguous offsets of the shape and dtype of scales of groups, got "
                f"{_form(offsets)}"
            )
        return (*stacked, outputs, inputs, group or 0, _GROUP_DTYPES[scales.dtype])

    return read


def _check_tiles(
    values: Tensor, scales: Tensor | None, stacked: tuple[int, ...], inputs: int, outputs: int
) -> None:
    held = _VALUES_OF_A_SLICE.get(values.dtype, 0)
    if not held or inputs % held or (scales is None) != (values.dtype == torch.bfloat16):
        raise ValueError(
            f"no strips are of {values.dtype}, {inputs} inputs, and scales "
            f"{None if scales is None else _form(scales)}"
        )
    width = STRIP * 4 // values.element_size()
    expected = (*stacked, -(-outputs // STRIP), inputs // held, width)
    if values.shape != expected:
        raise ValueError(
            f"expected weights in strips {expected} for {inputs} inputs and {outputs} outputs, got "
            f"{tuple(values.shape)}"
        )


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
