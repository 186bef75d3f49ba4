"""Rounding of a matrix's rows to few bits: in torch, or by the CPU's kernels, to the same bits.

`rounding.cpp` repeats every operation. Sums are of integers, so their order does not matter;
nothing else is a sum of products, which a compiler might fuse.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

from src.core.cpus import usable_cpus
from src.ops.matrix import INT4_RUN, Encoding, Matrix, pack_int4

Method = Literal["int8", "int4"]

_KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
# Weights quantized at a time: what is computed of them stays in a cache.
_AT_ONCE = 2**15
_PARTS = 256  # of a step: values are rounded to them before they are summed
_NOTHING = 2.0**-100  # of a range: its inverse would overflow
# Numbers of a group whose sums float32 has: the largest are squares of 256 parts that were missed.
_MOST_IN_FLOAT32 = 2**24 // _PARTS**2


class _OnCPU:
    """The kernel that rounds matrices in host memory; None: torch does."""

    kernel: Callable[..., Matrix] | None = None


_on_cpu = _OnCPU()


def install_cpu(kernel: Callable[..., Matrix] | None) -> None:
    """Round matrices in host memory with a kernel from now on, to the same bits; None: with torch.

    It takes what `quantize` takes; the matrix is contiguous.
    """
    _on_cpu.kernel = kernel


def quantize(weight: Tensor, method: Method, group_size: int, *, tiled: bool = False) -> Matrix:
    """Quantize a matrix [N, K] of any float dtype.

    Parameters
    ----------
    weight
        Finite values.
    method
        `int8` has one scale per row and values -127 to 127; `int4` has values -8 to 7, and a scale
        and an offset, in bfloat16, per `group_size` values of a row.
    group_size
        Of int4; a multiple of 32 that divides K.
    tiled
        Whether to lay it out in tiles for integer products, which round inputs to 8 bits. Matrices
        that cannot be cut into tiles stay in rows.

    Raises
    ------
    ValueError
        K is not a multiple of 32, or for int4 not of the group size.
    """
    inputs = weight.shape[1]
    unit = group_size if method == "int4" else INT4_RUN
    if inputs % unit or unit % INT4_RUN:
        raise ValueError(f"rows of {inputs} weights cannot be cut into groups of {unit}")
    encoding = Encoding("int8", None, torch.float32)
    if method == "int4":
        encoding = Encoding("int4", unit, torch.bfloat16, has_offsets=True)
    if weight.is_meta:
        # Running the operations on meta tensors would take a second per start.
        parts = encoding.parts(*weight.shape).items()
        empty = {kind: weight.new_empty(shape, dtype=dtype) for kind, (shape, dtype) in parts}
        scales = empty["scales"] if encoding.group else empty["scales"].squeeze(1)
        outline = Matrix(empty["values"], encoding, scales, empty.get("offsets"))
        return outline.tiled() if tiled else outline
    if _on_cpu.kernel is not None and weight.is_cpu and weight.dtype in _KERNEL_DTYPES:
        return _on_cpu.kernel(weight.contiguous(), method, unit, tiled=tiled)
    pieces = _rounded_pieces(weight, method, unit)
    values, scales, *offsets = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
    matrix = Matrix(values, encoding, scales, offsets[0] if offsets else None)
    return matrix.tiled() if tiled else matrix


def _rounded_pieces(weight: Tensor, method: Method, unit: int) -> list[tuple[Tensor, ...]]:
    """Values, scales and perhaps offsets of one piece of rows after the other.

    On the CPU several at once: a first start rounds a whole model here, while its kernels are
    compiled, and takes as long as this does.
    """

    def rounded(rows: Tensor) -> tuple[Tensor, ...]:
        return (
            round_to_int8(rows.float()) if method == "int8" else round_to_int4(rows.float(), unit)
        )

    pieces = weight.split(max(1, _AT_ONCE // weight.shape[1]))
    threads = min(usable_cpus(), len(pieces))
    if threads == 1 or not weight.is_cpu:
        return [rounded(rows) for rows in pieces]
    # Otherwise each of these threads would start as many of torch's own.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="round") as pool:
            return list(pool.map(rounded, pieces))
    finally:
        torch.set_num_threads(before)


def round_to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K], and scales [N], of float32 [N, K]: the largest magnitude becomes 127."""
    largest = rows.abs().amax(dim=1)
    scales = torch.where(largest == 0, 1.0, largest / 127)
    return (rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def round_to_int4(rows: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed int4 [N, K / 2], and scales and offsets, bfloat16 [N, G], of float32 [N, K].

    First, a group's least and greatest value are the ends of 16 levels, and each value takes the
    nearest level. Then scale and offset are fitted to these levels with the least squared error. A
    second set of levels has no offset, and -8 is the value of largest magnitude; it is taken where
    its error is clearly less. So a group whose values are evenly spaced keeps its spacing, and one
    around zero keeps its zeros. At last each value takes the level that is nearest by the rounded
    scale and offset.
    """
    # Groups side by side, [group_size, groups]: what is done to all of them runs along memory. What
    # is computed goes to the same places again: memory that is new costs more than arithmetic.
    groups = rows.reshape(-1, group_size).t().contiguous()
    parts, levels, room = groups.new_empty(3, *groups.shape)
    least, greatest = groups.amin(dim=0), groups.amax(dim=0)
    extent = greatest - least
    spreads = (extent >= _NOTHING) & extent.isfinite()
    largest = torch.where(-least >= greatest, least, greatest)
    _round_to_parts(torch.sub(groups, least, out=parts), extent, 15, spreads)
    _round_to_levels(parts, levels)
    scales, offsets = _fitted(levels, parts, least, extent / 15, room)
    fit = _misses(levels, parts, room) * (extent / 15).double().square_()
    _round_to_parts(parts.copy_(groups), largest, -8, spreads)
    _round_to_levels(parts, levels).clamp_(-8, 7)
    centred_fit = _misses(levels, parts, room) * (largest / -8).double().square_()
    is_centred = centred_fit * 8 < fit * 7
    scales = torch.where(is_centred, (largest / -8).to(torch.bfloat16), scales)
    scales = torch.where(spreads, scales, 0.0)
    offsets = torch.where(is_centred, 0.0, offsets)
    offsets = torch.where(spreads, offsets, (-least).to(torch.bfloat16))
    step = torch.where(scales == 0, 1.0, scales.float())
    # The groups may be the caller's own memory: one group of one row is as it was.
    rounded = torch.add(groups, offsets.float(), out=room).div_(step).round_().clamp_(-8, 7).add_(8)
    packed = pack_int4(rounded.to(torch.uint8).t().contiguous().view(rows.shape))
    return packed, scales.view(len(rows), -1), offsets.view(len(rows), -1)


def _round_to_parts(values: Tensor, extent: Tensor, steps: int, spreads: Tensor) -> None:
    """Quantize values in place, in units of 1 / `_PARTS` of a step; `extent` spans `steps` steps.

    The results are integers in float32, as levels and their products are: torch has vectors for
    floats.
    """
    # Not a number divided by `extent`: torch computes that as reciprocal times the number, which
    # rounds twice.
    inverse = torch.full_like(extent, steps * _PARTS) / extent
    values.mul_(torch.where(spreads, inverse, 0.0)).round_()


def _round_to_levels(parts: Tensor, levels: Tensor) -> Tensor:
    # Exact: a power of two divides.
    return torch.add(parts, _PARTS // 2, out=levels).mul_(1 / _PARTS).floor_()


def _summed(numbers: Tensor) -> Tensor:
    """Sums of integers, exact in any order."""
    fits = len(numbers) <= _MOST_IN_FLOAT32
    return numbers.sum(dim=0, dtype=torch.float32 if fits else torch.float64).double()


def _misses(levels: Tensor, parts: Tensor, room: Tensor) -> Tensor:
    """The sum of squares by which parts miss their levels."""
    torch.mul(levels, -_PARTS, out=room).add_(parts)
    return _summed(room.mul_(room))


def _fitted(
    levels: Tensor, parts: Tensor, least: Tensor, step: Tensor, room: Tensor
) -> tuple[Tensor, Tensor]:
    """Scale and offset, bfloat16 of groups, by which levels are nearest to the values they are of.

    ``parts`` are the values from ``least`` on.
    """
    count = len(levels)
    ones, values = _summed(levels), _summed(parts)
    covariance = count * _summed(torch.mul(levels, parts, out=room)) - ones * values
    variance = count * _summed(torch.mul(levels, levels, out=room)) - ones * ones
    part = (step / _PARTS).double()
    scales = (covariance / variance * part).to(torch.bfloat16)
    mean = least.double() + part * values / count
    offsets = scales.double() * (ones - 8 * count) / count - mean
    return scales, offsets.to(torch.bfloat16)
