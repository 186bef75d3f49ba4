# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products with quantized weights in rows, for CUDA devices.

A program computes some outputs of some tokens. In each step it reads inputs of one group of
weights: levels become the inputs' dtype, exactly, and the step's products are scaled in float32. So
weights are never rounded to the inputs' dtype. An offset of the group is taken from the products by
means of the inputs' sum. int4 has two halves of a run in one byte, so a step multiplies two halves
of its inputs, and nothing is interleaved.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from src.ops.launching_triton import ceil_div, launcher
from src.ops.matrix import INT4_RUN, Tiling
from src.ops.projections.linear import Linear


class Tile(NamedTuple):
    """Size of a program: tokens, outputs. Reasoned, not measured."""

    tokens: int
    outputs: int
    warps: int
    stages: int


_FEW = Tile(16, 32, 4, 5)
_MANY = Tile(64, 64, 4, 4)
_FEW_TOKENS = 32
_STEP_BYTES = 256  # of a token's inputs that a step reads, at most


def tile_of(tokens: int) -> Tile:
    """The tile for a number of tokens."""
    return _FEW if tokens <= _FEW_TOKENS else _MANY


def step_of(group: int, element_size: int) -> int:
    """How many inputs a step reads: a divisor of the group."""
    return math.gcd(group, _STEP_BYTES // element_size)


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x,  # [tokens, inputs], rows x_stride apart
    weight,  # [outputs, inputs] of 8 bits, or [outputs, inputs / 2] uint8
    scales,  # [outputs, groups] float32
    offsets,  # [outputs, groups] float32, or None
    bias,  # [outputs], or None
    out,  # [tokens, outputs]
    x_stride,
    tokens,
    inputs,
    outputs,
    group,  # inputs of a group
    IS_INT4: tl.constexpr,
    RUN: tl.constexpr,  # int4: weights in the bytes of a run
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,  # a divisor of `group`
):
    token = tl.program_id(1) * M + tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    is_token, is_output = token < tokens, n < outputs
    rows = x + token[:, None].to(tl.int64) * x_stride
    held = is_output[None, :]
    groups = inputs // group
    sums = tl.zeros([M, N], dtype=tl.float32)
    for begin in range(0, inputs, K):
        if IS_INT4:
            byte = tl.arange(0, K // 2)
            k = byte // (RUN // 2) * RUN + byte % (RUN // 2)
            first = tl.load(rows + begin + k[None, :], mask=is_token[:, None], other=0.0)
            second = tl.load(
                rows + begin + RUN // 2 + k[None, :], mask=is_token[:, None], other=0.0
            )
            of_bytes = n[None, :].to(tl.int64) * (inputs // 2) + begin // 2 + byte[:, None]
            pairs = tl.load(weight + of_bytes, mask=held, other=0x88).to(tl.int32)
            low = ((pairs & 15) - 8).to(first.dtype)
            high = ((pairs >> 4) - 8).to(first.dtype)
            products = tl.dot(first, low, input_precision="ieee")
            products = tl.dot(second, high, products, input_precision="ieee")
            given = tl.sum(first.to(tl.float32), 1) + tl.sum(second.to(tl.float32), 1)
        else:
            k = tl.arange(0, K)
            some = tl.load(rows + begin + k[None, :], mask=is_token[:, None], other=0.0)
            of_levels = n[None, :].to(tl.int64) * inputs + begin + k[:, None]
            # Outputs that are none may have anything.
            levels = tl.load(weight + of_levels, mask=held).to(some.dtype)
            products = tl.dot(some, levels, input_precision="ieee")
            given = tl.sum(some.to(tl.float32), 1)
        place = n.to(tl.int64) * groups + begin // group
        sums += products * tl.load(scales + place, mask=is_output, other=0.0)[None, :]
        if offsets is not None:
            offset = tl.load(offsets + place, mask=is_output, other=0.0)
            sums -= given[:, None] * offset[None, :]
    if bias is not None:
        sums += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out + token[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_token[:, None] & held)


_launch_linear = launcher(_linear_kernel)


@Linear.taking_flat
def run(call: Linear) -> Tensor:
    """Launch the kernel of `linear`.

    There is a kernel for quantized weights in rows; plain ones are torch's.

    Raises
    ------
    ValueError
        There is no kernel for such weights. Loading a model decodes them.
    """
    x, matrix, bias = call.x, call.weight, call.bias
    tokens, inputs = x.shape
    if matrix.scales is None and matrix.tiling is Tiling.ROWS:
        return functional.linear(x, matrix.values, bias)
    traits = matrix.encoding.traits
    is_known = "cuda" in traits.kernels and traits.is_known_to(x.device)
    if matrix.tiling is Tiling.TILES or inputs % INT4_RUN or not is_known:
        raise ValueError(
            f"no kernel for CUDA multiplies {matrix.encoding} in {matrix.tiling.value} with "
            f"{inputs} inputs"
        )
    if x.stride(1) != 1:
        x = x.contiguous()
    outputs = len(matrix.values)
    out = x.new_empty((tokens, outputs))
    if tokens == 0 or outputs == 0:
        return out
    group = matrix.group
    tile = tile_of(tokens)
    grid = (ceil_div(outputs, tile.outputs), ceil_div(tokens, tile.tokens))
    _launch_linear(
        grid,
        x, matrix.values, matrix.scales, matrix.offsets, bias, out, x.stride(0), tokens, inputs,
        outputs, group, IS_INT4=traits.bits == 4, RUN=INT4_RUN, M=tile.tokens, N=tile.outputs,
        K=step_of(group, x.element_size()), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
