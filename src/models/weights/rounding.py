"""Rounding of a matrix's rows to few bits, in torch; the CPU's kernels give the same bits.

`src/ops/cpu/quantize.cpp` repeats every operation. Sums are of integers, so their order does not
matter; nothing else is a sum of products, which a compiler might fuse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from src.ops.linear import pack_int4

_PARTS = 256  # of a step: values are rounded to them before they are summed
_NOTHING = 2.0**-100  # of a range: its inverse would overflow
_MOST_IN_32_BITS = 8192  # numbers of a group: no sum of theirs overflows


def round_to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K], and scales [N], of float32 [N, K]: the largest magnitude becomes 127."""
    largest = rows.abs().amax(dim=1)
    scales = torch.where(largest == 0, 1.0, largest / 127)
    return (rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def round_to_int4(rows: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed int4 [N, K / 2], and scales and offsets, bfloat16 [N, G], of float32 [N, K].

    A group's least and greatest value become the ends of 16 levels. Scale and offset then are those
    that meet the group with the least squared error, if its values keep these levels. Where levels
    without an offset, of which -8 is the value of largest magnitude, are clearly nearer, there is
    none. So what was spaced evenly keeps its spacing, and a group around zero its zeros. At last
    each value takes the level that is nearest by the rounded scale and offset.
    """
    groups = rows.view(len(rows), -1, group_size)
    least, greatest = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    extent = greatest - least
    spreads = (extent >= _NOTHING) & extent.isfinite()
    largest = torch.where(-least >= greatest, least, greatest)
    parts = _parts_of(groups - least, extent, 15, spreads)
    levels = (parts + _PARTS // 2) >> 8
    scales, offsets = _fitted(levels, parts, least, extent / 15)
    centred = _parts_of(groups, largest, -8, spreads)
    nearest = ((centred + _PARTS // 2) >> 8).clamp_(-8, 7)
    fit = _squares(parts - levels * _PARTS) * (extent / 15).double().square_()
    centred_fit = _squares(centred - nearest * _PARTS) * (largest / -8).double().square_()
    is_centred = centred_fit * 8 < fit * 7
    scales = torch.where(is_centred, (largest / -8).to(torch.bfloat16), scales)
    scales = torch.where(spreads, scales, 0.0)
    offsets = torch.where(is_centred, 0.0, offsets)
    offsets = torch.where(spreads, offsets, (-least).to(torch.bfloat16))
    step = torch.where(scales == 0, 1.0, scales.float())
    rounded = ((groups + offsets.float()) / step).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    return pack_int4(rounded.view(rows.shape)), scales.squeeze(2), offsets.squeeze(2)


def _parts_of(values: Tensor, extent: Tensor, steps: int, spreads: Tensor) -> Tensor:
    """Values as a number of parts of a step, of which ``extent`` has so many; int32."""
    # Not a number divided by `extent`: torch computes that as reciprocal times the number, which
    # rounds twice.
    inverse = torch.full_like(extent, steps * _PARTS) / extent
    return (values * torch.where(spreads, inverse, 0.0)).round_().int()


def _summed(numbers: Tensor) -> Tensor:
    # torch widens to 64 bits one number at a time, which takes nine times as long.
    fits = numbers.shape[2] <= _MOST_IN_32_BITS
    return numbers.sum(dim=2, keepdim=True, dtype=torch.int32 if fits else torch.int64).double()


def _squares(numbers: Tensor) -> Tensor:
    return _summed(numbers * numbers)


def _fitted(levels: Tensor, parts: Tensor, least: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset, bfloat16 [N, G, 1], by which levels are nearest to the values they are of.

    ``parts`` are the values from ``least`` on.
    """
    count = levels.shape[2]
    ones, values = _summed(levels), _summed(parts)
    covariance = count * _summed(levels * parts) - ones * values
    variance = count * _squares(levels) - ones * ones
    part = (step / _PARTS).double()
    scales = (covariance / variance * part).to(torch.bfloat16)
    mean = least.double() + part * values / count
    offsets = scales.double() * (ones - 8 * count) / count - mean
    return scales, offsets.to(torch.bfloat16)
