# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""A mixture of experts for CUDA devices: two grouped products and a sum of each token's results.

(Token, expert) pairs are sorted by expert. A program computes some outputs for a block of one
expert's pairs. It finds its expert from the experts' counts on the device, so the grid depends on
sizes only and the launch can be captured. There are enough blocks for the worst distribution;
unneeded ones end at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from src.ops.experts import ACTIVATIONS, CLAMPED_SWIGLU, reference, sort_by_expert

_GELU_TANH = tl.constexpr(ACTIVATIONS["gelu_tanh"])
_CLAMPED_SWIGLU = tl.constexpr(CLAMPED_SWIGLU)


class Tile(NamedTuple):
    """Size of a program: pairs, outputs, inputs per iteration. Reasoned, not measured."""

    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int


_FEW, _MANY = "few", "many"
_TILES = {
    (_FEW, 2): Tile(16, 64, 128, 4, 4),
    (_MANY, 2): Tile(64, 64, 64, 4, 4),
    (_FEW, 4): Tile(16, 32, 64, 4, 3),
    (_MANY, 4): Tile(64, 32, 32, 4, 3),
}
_COMBINED = 1024  # outputs of a token that one program sums


def tile_of(pairs: int, experts: int, element_size: int, *, deterministic: bool) -> Tile:
    """The tile for a number of pairs; with `deterministic`, the same one for all numbers."""
    crowd = _MANY if deterministic or pairs > 16 * experts else _FEW
    return _TILES[crowd, element_size]


@triton.jit
def _block_of(ends, num_experts, M: tl.constexpr, E: tl.constexpr):
    """This program's expert, and its sorted pairs [first, last)."""
    block = tl.program_id(0)
    expert = tl.arange(0, E)
    end = tl.load(ends + expert, mask=expert < num_experts, other=0)
    start = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0)
    blocks = tl.where(expert < num_experts, (end - start + M - 1) // M, 0)
    behind = tl.cumsum(blocks, 0)  # number of blocks up to each expert's end
    mine = (behind > block) & (behind - blocks <= block)
    number = tl.sum(tl.where(mine, expert, 0), 0)
    last = tl.sum(tl.where(mine, end, 0), 0)
    first = tl.sum(tl.where(mine, start + (block - (behind - blocks)) * M, 0), 0)
    return number, first, last


@triton.jit
def _joined(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    if ACTIVATION == _CLAMPED_SWIGLU:
        # Comparisons are such that a NaN stays one.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up) + 1.0
    y = gate
    if ACTIVATION == _CLAMPED_SWIGLU:
        y = ALPHA * gate
    # The tanh approximation of gelu equals x * sigmoid(2 * u).
    if ACTIVATION == _GELU_TANH:
        y = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-y)) * up


@triton.jit
def _gate_up_kernel(
    hidden,  # [tokens, inputs], rows hidden_stride apart
    gate_up,  # [experts, 2 * outputs, inputs]
    scales,  # [experts, 2 * outputs] float32, or None
    bias,  # [experts, 2 * outputs], or None
    weights,  # [tokens, chosen] float32, factors of the inputs; or None
    order,  # [pairs] int64, sorted pair -> index into [tokens, chosen]
    ends,  # [experts] int32, expert -> end of its sorted pairs
    activated,  # [pairs, outputs]
    hidden_stride,
    num_experts,
    chosen,
    inputs,
    outputs,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    expert, first, last = _block_of(ends, num_experts, M, E)
    if first >= last:
        return
    pair = first + tl.arange(0, M)
    is_pair = pair < last
    place = tl.load(order + pair, mask=is_pair, other=0)
    token = place // chosen
    n = tl.program_id(1) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    is_output = n < outputs
    x = hidden + token[:, None] * hidden_stride + k[None, :]
    weight = gate_up + expert.to(tl.int64) * (2 * outputs) * inputs
    gate_rows = weight + n[None, :].to(tl.int64) * inputs + k[:, None]
    up_rows = gate_rows + outputs.to(tl.int64) * inputs
    gates = tl.zeros([M, N], dtype=tl.float32)
    ups = tl.zeros([M, N], dtype=tl.float32)
    for begin in range(0, inputs, K):
        rest = inputs - begin
        some = tl.load(x + begin, mask=is_pair[:, None] & (k[None, :] < rest), other=0.0)
        if weights is not None:
            factor = tl.load(weights + place, mask=is_pair, other=0.0)
            some = (some.to(tl.float32) * factor[:, None]).to(some.dtype)
        held = (k[:, None] < rest) & is_output[None, :]
        gate = tl.load(gate_rows + begin, mask=held, other=0).to(some.dtype)
        up = tl.load(up_rows + begin, mask=held, other=0).to(some.dtype)
        gates = tl.dot(some, gate, gates, input_precision="ieee")
        ups = tl.dot(some, up, ups, input_precision="ieee")
    if scales is not None:
        of_rows = scales + expert * 2 * outputs + n
        gates *= tl.load(of_rows, mask=is_output, other=0.0)[None, :]
        ups *= tl.load(of_rows + outputs, mask=is_output, other=0.0)[None, :]
    if bias is not None:
        of_rows = bias + expert * 2 * outputs + n
        gates += tl.load(of_rows, mask=is_output, other=0.0).to(tl.float32)[None, :]
        ups += tl.load(of_rows + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    # Projections are rounded to the dtype, as in `linear`.
    element = activated.dtype.element_ty
    gates, ups = gates.to(element).to(tl.float32), ups.to(element).to(tl.float32)
    to = activated + pair[:, None].to(tl.int64) * outputs + n[None, :]
    result = _joined(gates, ups, ACTIVATION, ALPHA, LIMIT).to(element)
    tl.store(to, result, mask=is_pair[:, None] & is_output[None, :])


@triton.jit
def _down_kernel(
    activated,  # [pairs, inputs], sorted
    down,  # [experts, outputs, inputs]
    scales,  # [experts, outputs] float32, or None
    bias,  # [experts, outputs], or None
    order,  # [pairs] int64
    ends,  # [experts] int32
    results,  # [tokens, chosen, outputs]
    num_experts,
    inputs,
    outputs,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    expert, first, last = _block_of(ends, num_experts, M, E)
    if first >= last:
        return
    pair = first + tl.arange(0, M)
    is_pair = pair < last
    n = tl.program_id(1) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    is_output = n < outputs
    x = activated + pair[:, None].to(tl.int64) * inputs + k[None, :]
    weight = down + expert.to(tl.int64) * outputs * inputs
    rows = weight + n[None, :].to(tl.int64) * inputs + k[:, None]
    sums = tl.zeros([M, N], dtype=tl.float32)
    for begin in range(0, inputs, K):
        rest = inputs - begin
        some = tl.load(x + begin, mask=is_pair[:, None] & (k[None, :] < rest), other=0.0)
        held = (k[:, None] < rest) & is_output[None, :]
        row = tl.load(rows + begin, mask=held, other=0).to(some.dtype)
        sums = tl.dot(some, row, sums, input_precision="ieee")
    if scales is not None:
        of_rows = scales + expert * outputs + n
        sums *= tl.load(of_rows, mask=is_output, other=0.0)[None, :]
    if bias is not None:
        of_rows = bias + expert * outputs + n
        sums += tl.load(of_rows, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = tl.load(order + pair, mask=is_pair, other=0)
    to = results + place[:, None] * outputs + n[None, :]
    held = is_pair[:, None] & is_output[None, :]
    tl.store(to, sums.to(results.dtype.element_ty), mask=held)


@triton.jit
def _combine_kernel(
    results,  # [tokens, chosen, outputs], undefined where there is no expert
    weights,  # [tokens, chosen] float32; None: 1
    ids,  # [tokens, chosen] int64
    out,  # [tokens, outputs]
    num_experts,
    chosen,
    outputs,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(chosen):
        pair = token * chosen + j
        expert = tl.load(ids + pair)
        if (expert >= 0) & (expert < num_experts):
            result = tl.load(results + pair * outputs + n, mask=n < outputs, other=0.0)
            if weights is not None:
                sums += tl.load(weights + pair) * result.to(tl.float32)
            else:
                sums += result.to(tl.float32)
    to = out + token * outputs + n
    tl.store(to, sums.to(out.dtype.element_ty), mask=n < outputs)


def run(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up_scales: Tensor | None,
    down_scales: Tensor | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    alpha: float,
    limit: float,
    weighs_inputs: bool,
    deterministic: bool,
) -> Tensor:
    """Launch the kernels; arguments as in [`experts`][src.ops.experts.experts].

    There are kernels for row-major weights in hidden's dtype or int8; the reference serves others.
    """
    if gate_up.dim() != 3 or down.dim() != 3 or torch.uint8 in (gate_up.dtype, down.dtype):
        return reference(
            *(hidden, gate_up, down, weights, ids, gate_up_scales, down_scales),
            *(gate_up_bias, down_bias, activation, alpha, limit, weighs_inputs, deterministic),
        )
    tokens, size = hidden.shape
    experts, chosen = len(gate_up), ids.shape[1]
    intermediate, pairs = down.shape[2], tokens * chosen
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if pairs == 0:
        return out.zero_()
    order, ends = sort_by_expert(ids, experts)
    activated = hidden.new_empty((pairs, intermediate))
    results = hidden.new_empty((pairs, size))
    tile = tile_of(pairs, experts, hidden.element_size(), deterministic=deterministic)
    blocks = pairs // tile.pairs + min(pairs, experts)
    common = {
        "M": tile.pairs,
        "N": tile.outputs,
        "K": tile.inputs,
        "E": triton.next_power_of_2(experts),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    _gate_up_kernel[(blocks, triton.cdiv(intermediate, tile.outputs))](
        hidden, gate_up, gate_up_scales, gate_up_bias, weights if weighs_inputs else None,
        order, ends, activated, hidden.stride(0), experts, chosen, size, intermediate,
        ACTIVATION=activation, ALPHA=alpha, LIMIT=limit, **common,
    )  # fmt: skip
    _down_kernel[(blocks, triton.cdiv(size, tile.outputs))](
        activated, down, down_scales, down_bias, order, ends, results, experts, intermediate, size,
        **common,
    )  # fmt: skip
    _combine_kernel[(tokens, triton.cdiv(size, _COMBINED))](
        results, None if weighs_inputs else weights, ids, out, experts, chosen, size,
        BLOCK=_COMBINED, num_warps=4,
    )  # fmt: skip
    return out
