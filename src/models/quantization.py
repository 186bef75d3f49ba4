"""Quantization at load: int8 by row, int4 by group, both symmetric, by rounding.

Norms, biases and the embedding keep the model's dtype. Activations do as well, unless the weights
are laid out in strips: then a projection rounds its inputs to 8 bits, and multiplies integers.
Rounding to the nearest of evenly spaced values needs no calibration data, and so no data of
anybody's.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch

from src.ops.cpu.build import kernel_library
from src.ops.cpu.kernel_library import DTYPES
from src.ops.linear import INT4_RUN, STRIP, dequantize, fits_strips, to_quantized_strips

Method = Literal["int8", "int4"]

_ROWS_AT_ONCE = 4096  # of a matrix, so that its float32 copy stays small


class QuantizedWeight(NamedTuple):
    """A matrix [N, K] in few bits; `dequantize` gives it back in float32.

    Both tensors are as here, or as `to_quantized_strips` makes them.
    """

    values: torch.Tensor  # int8 [N, K], or uint8 [N, K / 2] of packed int4
    scales: torch.Tensor  # float32 [N], or [N, K / group]

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def dequantized(self) -> torch.Tensor:
        """The matrix that it stands for, float32 [N, K]."""
        return dequantize(self.values, self.scales)


Weight: TypeAlias = torch.Tensor | QuantizedWeight


def plain(weight: Weight) -> torch.Tensor:
    """A weight that is not quantized.

    Raises:
        TypeError: it is.
    """
    if isinstance(weight, QuantizedWeight):
        raise TypeError("expected a weight in the model's dtype, got a quantized one")
    return weight


def quantize(
    weight: torch.Tensor, method: Method, group_size: int, *, in_strips: bool = False
) -> QuantizedWeight:
    """Quantize a matrix [N, K] of any float dtype.

    Args:
        weight: finite values.
        method: `int8` has one scale a row and values -127 to 127; `int4` one scale for each
            `group_size` values of a row, and values -8 to 7.
        group_size: of int4: a multiple of 32 that divides K.
        in_strips: whether to lay it out for products of integers, see `to_quantized_strips`;
            matrices that cannot be cut into strips stay in rows.

    Raises:
        ValueError: K is not a multiple of 32, or for int4 not of the group size.
    """
    inputs = weight.shape[1]
    unit = group_size if method == "int4" else INT4_RUN
    if inputs % unit or unit % INT4_RUN:
        raise ValueError(f"rows of {inputs} weights cannot be cut into groups of {unit}")
    if weight.is_meta:
        return _outlined(weight, method, unit, in_strips=in_strips)
    library = kernel_library()
    if library is not None and weight.is_cpu and weight.dtype in DTYPES:
        kind = torch.int8 if method == "int8" else torch.uint8
        return QuantizedWeight(
            *library.quantize(weight.contiguous(), kind, unit, in_strips=in_strips)
        )
    parts = [_quantized(rows.float(), method, group_size) for rows in weight.split(_ROWS_AT_ONCE)]
    if in_strips and all(fits_strips(values) for values, _ in parts):
        parts = [to_quantized_strips(*part) for part in parts]
    return QuantizedWeight(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _outlined(
    weight: torch.Tensor, method: Method, group_size: int, *, in_strips: bool
) -> QuantizedWeight:
    """Shapes alone: operations on tensors without values cost a start a second."""
    (rows, inputs), is_int8 = weight.shape, method == "int8"
    values = torch.empty(
        *(rows, inputs if is_int8 else inputs // 2),
        dtype=torch.int8 if is_int8 else torch.uint8,
        device="meta",
    )
    scales: tuple[int, ...] = (rows,) if is_int8 else (rows, inputs // group_size)
    if in_strips and fits_strips(values):
        strips = -(-rows // STRIP)
        values = values.new_empty(strips, values.shape[1] // 4, 4 * STRIP)
        scales = scales if is_int8 else (strips, inputs // group_size, STRIP)
    return QuantizedWeight(values, torch.empty(scales, device="meta"))


def _quantized(
    rows: torch.Tensor, method: Method, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if method == "int8":
        scales = _scales(rows, 127)
        return (rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales
    count, inputs = rows.shape
    groups = rows.view(count, -1, group_size)
    # The scale's sign is that of the largest value, which so becomes -8, the end with more room.
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scales = torch.where(largest == 0, 1.0, largest / -8)
    levels = (groups / scales).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    runs = levels.view(count, inputs // INT4_RUN, 2, INT4_RUN // 2)
    packed = runs[:, :, 0] | (runs[:, :, 1] << 4)
    return packed.reshape(count, inputs // 2), scales.squeeze(2).contiguous()


def _scales(rows: torch.Tensor, levels: int) -> torch.Tensor:
    largest = rows.abs().amax(dim=1)
    return torch.where(largest == 0, 1.0, largest / levels)
