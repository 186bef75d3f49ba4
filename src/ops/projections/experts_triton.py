# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""A mixture of experts for CUDA devices: two grouped products and a sum of each token's results.

(Token, expert) pairs are sorted by expert. A program computes some outputs for a block of one
expert's pairs. It finds its expert from the experts' counts on the device, so the grid depends on
sizes only and the launch can be captured. There are enough blocks for the worst distribution;
unneeded ones end at once.

Weights in groups become the dtype of the inputs, exactly, and the products of each group are scaled
in float32, as in `linear`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from src.ops.launching_triton import ceil_div, launcher, next_power_of_2
from src.ops.matrix import INT4_RUN, Matrix, Tiling
from src.ops.projections.experts import (
    ACTIVATIONS,
    CLAMPED_SWIGLU,
    PAIRS_OF_A_CROWD,
    Experts,
    gating_arguments,
    sort_by_expert,
)
from src.ops.projections.linear_triton import step_of
from src.ops.tuning import of_device

_GELU_TANH = tl.constexpr(ACTIVATIONS["gelu_tanh"])
_CLAMPED_SWIGLU = tl.constexpr(CLAMPED_SWIGLU)


class Tile(NamedTuple):
    """Size of a program: pairs, outputs, inputs per iteration."""

    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int


_FEW, _MANY, _MANY_IN_GROUPS = "few", "many", "many, in groups"
# (Compute capability or 0 for all others, (pairs, bytes of an input)) -> tile. That of Hopper was
# the fastest of those measured on an H200; the others are reasoned. Weights in groups take a sum of
# each group too, so their tiles are smaller.
_TILES = {
    (90, (_MANY, 2)): Tile(128, 128, 64, 8, 3),
    (0, (_FEW, 2)): Tile(16, 64, 128, 4, 4),
    (0, (_MANY, 2)): Tile(64, 64, 64, 4, 4),
    (0, (_MANY_IN_GROUPS, 2)): Tile(64, 64, 64, 4, 4),
    (0, (_FEW, 4)): Tile(16, 32, 64, 4, 3),
    (0, (_MANY, 4)): Tile(64, 32, 32, 4, 3),
    (0, (_MANY_IN_GROUPS, 4)): Tile(64, 32, 32, 4, 3),
}
_COMBINED = 1024  # outputs of a token that one program sums
# What weights are.
_ROWS = tl.constexpr(0)  # in the inputs' dtype, or int8 by row
_BYTES = tl.constexpr(1)  # 8 bits in groups
_INT4 = tl.constexpr(2)
_E2M1 = tl.constexpr(3)


def tile_of(call: Experts) -> Tile:
    """The tile for a call's number of pairs; a deterministic one has the same for all numbers."""
    is_crowd = call.ids.numel() > PAIRS_OF_A_CROWD * len(call.gate_up.values)
    size = _FEW
    if call.deterministic or is_crowd:
        size = _MANY if _is_of_rows(call.gate_up) and _is_of_rows(call.down) else _MANY_IN_GROUPS
    return of_device(_TILES, call.x.device, (size, call.x.element_size()))


@triton.jit
def _block_of(block, ends, num_experts, M: tl.constexpr, E: tl.constexpr):
    """A block's expert, and its sorted pairs [first, last)."""
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
def _level(nibble, KIND: tl.constexpr):
    """The number of four bits; of e2m1 it is doubled, which makes it an integer."""
    level = nibble - 8
    if KIND == _E2M1:
        magnitude = nibble & 7
        exponent = magnitude >> 1
        normal = ((magnitude & 1) | 2) << (tl.maximum(exponent, 1) - 1)
        doubled = tl.where(exponent == 0, magnitude, normal)
        level = tl.where(nibble > 7, -doubled, doubled)
    return level


@triton.jit
def _scale(scales, place, mask, KIND: tl.constexpr):
    """Scales of groups; of e2m1 they are halved, since its numbers are doubled."""
    numbers = tl.load(scales + place, mask=mask, other=0)
    wide = numbers.to(tl.float32)
    if KIND == _E2M1:
        bits = tl.maximum(numbers.to(tl.int32) << 23, 1 << 22)
        wide = bits.to(tl.float32, bitcast=True) * 0.5
    return wide


@triton.jit
def _in_groups(
    x,  # pointers to the first inputs of pairs [M, 1]
    columns,  # [inputs] int32, column of weights -> input; None: in order
    is_pair,
    factor,  # of inputs, [M]; or None
    weight,  # of all experts, rows one after another
    scales,
    offsets,  # or None
    row,  # [N] int64, numbers of rows
    is_output,
    inputs,
    group,  # inputs of a group
    KIND: tl.constexpr,
    RUN: tl.constexpr,  # four bits: weights in the bytes of a run
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,  # a divisor of `group`
):
    """Sums [M, N] of pairs against rows of weights in groups."""
    held = is_output[None, :]
    sums = tl.zeros([M, N], dtype=tl.float32)
    for begin in range(0, inputs, K):
        if KIND == _BYTES:
            k = tl.arange(0, K)
            some = _inputs(x, columns, begin + k, is_pair, factor)
            at = row[None, :] * inputs + begin + k[:, None]
            # Outputs that are none may have anything.
            levels = tl.load(weight + at, mask=held).to(some.dtype)
            products = tl.dot(some, levels, input_precision="ieee")
            given = tl.sum(some.to(tl.float32), 1)
        else:
            byte = tl.arange(0, K // 2)
            k = byte // (RUN // 2) * RUN + byte % (RUN // 2)
            first = _inputs(x, columns, begin + k, is_pair, factor)
            second = _inputs(x, columns, begin + RUN // 2 + k, is_pair, factor)
            at = row[None, :] * (inputs // 2) + begin // 2 + byte[:, None]
            pairs = tl.load(weight + at, mask=held, other=0).to(tl.int32)
            low = _level(pairs & 15, KIND).to(first.dtype)
            high = _level(pairs >> 4, KIND).to(first.dtype)
            products = tl.dot(first, low, input_precision="ieee")
            products = tl.dot(second, high, products, input_precision="ieee")
            given = tl.sum(first.to(tl.float32), 1) + tl.sum(second.to(tl.float32), 1)
        place = row * (inputs // group) + begin // group
        sums += products * _scale(scales, place, is_output, KIND)[None, :]
        if offsets is not None:
            offset = tl.load(offsets + place, mask=is_output, other=0.0).to(tl.float32)
            sums -= given[:, None] * offset[None, :]
    return sums


@triton.jit
def _inputs(x, columns, k, is_pair, factor):
    """Inputs [M, K] for columns k of weights."""
    at = k
    if columns is not None:
        at = tl.load(columns + k)
    some = tl.load(x + at[None, :], mask=is_pair[:, None], other=0.0)
    if factor is not None:
        some = (some.to(tl.float32) * factor[:, None]).to(some.dtype)
    return some


@triton.jit
def _of(columns, expert, inputs):
    """An expert's own; or None."""
    own = columns
    if columns is not None:
        own = columns + expert * inputs
    return own


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
    gate_up,  # [experts, 2 * outputs, inputs], or half as many bytes
    scales,  # [experts, 2 * outputs] float32, or of groups [..., inputs / group]; or None
    offsets,  # of groups, or None
    bias,  # [experts, 2 * outputs], or None
    columns,  # [experts, inputs] int32, column of weights in groups -> input; None: in order
    weights,  # [tokens, chosen] float32, factors of the inputs; or None
    order,  # [pairs] int64, sorted pair -> index into [tokens, chosen]
    ends,  # [experts] int32, expert -> end of its sorted pairs
    activated,  # [pairs, outputs]
    hidden_stride,
    num_experts,
    chosen,
    inputs,
    outputs,
    group,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    # Programs that run at one time share inputs of few blocks, and weights of few experts.
    parts = (outputs + N - 1) // N
    block = tl.program_id(0) // parts
    expert, first, last = _block_of(block, ends, num_experts, M, E)
    if first >= last:
        return
    pair = first + tl.arange(0, M)
    is_pair = pair < last
    place = tl.load(order + pair, mask=is_pair, other=0)
    token = place // chosen
    n = tl.program_id(0) % parts * N + tl.arange(0, N)
    k = tl.arange(0, K)
    is_output = n < outputs
    x = hidden + token[:, None] * hidden_stride + k[None, :]
    factor = None
    if weights is not None:
        factor = tl.load(weights + place, mask=is_pair, other=0.0)
    gate_row = expert.to(tl.int64) * 2 * outputs + n
    gates = tl.zeros([M, N], dtype=tl.float32)
    ups = tl.zeros([M, N], dtype=tl.float32)
    if KIND == _ROWS:
        gate_rows = gate_up + gate_row[None, :] * inputs + k[:, None]
        up_rows = gate_rows + outputs.to(tl.int64) * inputs
        for begin in range(0, inputs, K):
            rest = inputs - begin
            some = tl.load(x + begin, mask=is_pair[:, None] & (k[None, :] < rest), other=0.0)
            if factor is not None:
                some = (some.to(tl.float32) * factor[:, None]).to(some.dtype)
            held = (k[:, None] < rest) & is_output[None, :]
            gate = tl.load(gate_rows + begin, mask=held, other=0).to(some.dtype)
            up = tl.load(up_rows + begin, mask=held, other=0).to(some.dtype)
            gates = tl.dot(some, gate, gates, input_precision="ieee")
            ups = tl.dot(some, up, ups, input_precision="ieee")
        if scales is not None:
            gates *= tl.load(scales + gate_row, mask=is_output, other=0.0)[None, :]
            ups *= tl.load(scales + outputs + gate_row, mask=is_output, other=0.0)[None, :]
    else:
        first = hidden + token[:, None] * hidden_stride
        own = _of(columns, expert, inputs)
        gates = _in_groups(
            first, own, is_pair, factor, gate_up, scales, offsets, gate_row, is_output, inputs,
            group, KIND, RUN, M, N, K,
        )  # fmt: skip
        ups = _in_groups(
            first, own, is_pair, factor, gate_up, scales, offsets, gate_row + outputs, is_output,
            inputs, group, KIND, RUN, M, N, K,
        )  # fmt: skip
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


_launch_gate_up = launcher(_gate_up_kernel)


@triton.jit
def _down_kernel(
    activated,  # [pairs, inputs], sorted
    down,  # weights, scales and offsets as those of gate and up
    scales,
    offsets,
    bias,  # [experts, outputs], or None
    columns,
    order,  # [pairs] int64
    ends,  # [experts] int32
    results,  # [tokens, chosen, outputs]
    num_experts,
    inputs,
    outputs,
    group,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    # Programs that run at one time share inputs of few blocks, and weights of few experts.
    parts = (outputs + N - 1) // N
    block = tl.program_id(0) // parts
    expert, first, last = _block_of(block, ends, num_experts, M, E)
    if first >= last:
        return
    pair = first + tl.arange(0, M)
    is_pair = pair < last
    n = tl.program_id(0) % parts * N + tl.arange(0, N)
    k = tl.arange(0, K)
    is_output = n < outputs
    x = activated + pair[:, None].to(tl.int64) * inputs + k[None, :]
    row = expert.to(tl.int64) * outputs + n
    sums = tl.zeros([M, N], dtype=tl.float32)
    if KIND == _ROWS:
        rows = down + row[None, :] * inputs + k[:, None]
        for begin in range(0, inputs, K):
            rest = inputs - begin
            some = tl.load(x + begin, mask=is_pair[:, None] & (k[None, :] < rest), other=0.0)
            held = (k[:, None] < rest) & is_output[None, :]
            levels = tl.load(rows + begin, mask=held, other=0).to(some.dtype)
            sums = tl.dot(some, levels, sums, input_precision="ieee")
        if scales is not None:
            sums *= tl.load(scales + row, mask=is_output, other=0.0)[None, :]
    else:
        first = activated + pair[:, None].to(tl.int64) * inputs
        own = _of(columns, expert, inputs)
        sums = _in_groups(
            first, own, is_pair, None, down, scales, offsets, row, is_output, inputs, group,
            KIND, RUN, M, N, K,
        )  # fmt: skip
    if bias is not None:
        of_rows = bias + expert * outputs + n
        sums += tl.load(of_rows, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = tl.load(order + pair, mask=is_pair, other=0)
    to = results + place[:, None] * outputs + n[None, :]
    held = is_pair[:, None] & is_output[None, :]
    tl.store(to, sums.to(results.dtype.element_ty), mask=held)


_launch_down = launcher(_down_kernel)


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


_launch_combine = launcher(_combine_kernel)


class _Held(NamedTuple):
    """How the kernels read a stack of matrices."""

    kind: int
    group: int
    step: int  # inputs per iteration


def _held(matrix: Matrix, size: int, tile: Tile) -> _Held:
    """``size``: bytes of an input."""
    if _is_of_rows(matrix):
        return _Held(_ROWS.value, matrix.inputs, tile.inputs)
    kind = {"int4": _INT4, "e2m1": _E2M1}.get(matrix.encoding.number, _BYTES)
    return _Held(kind.value, matrix.group, step_of(matrix.group, size))


def _is_of_rows(matrix: Matrix) -> bool:
    """Whether products are scaled once, at the end of a row, if at all."""
    by_row = matrix.encoding.number == "int8" and matrix.encoding.group is None
    return matrix.order is None and (matrix.scales is None or by_row)


def _require_kernel(matrix: Matrix) -> None:
    """Loading a model decodes what this refuses.

    Raises
    ------
    ValueError
        The kernels cannot read such a stack of matrices.
    """
    traits, inputs = matrix.encoding.traits, matrix.inputs
    is_known = "cuda" in traits.expert_kernels and traits.is_known_to(matrix.values.device)
    in_groups = matrix.scales is not None and inputs % INT4_RUN == 0
    if matrix.tiling is Tiling.TILES or not is_known or not (_is_of_rows(matrix) or in_groups):
        raise ValueError(
            f"no kernel for CUDA multiplies experts of {matrix.encoding} in {matrix.tiling.value} "
            f"with {inputs} inputs"
        )


@Experts.taking_flat
def run(call: Experts) -> Tensor:
    """Launch the kernels of `experts`.

    There are kernels for weights in rows, in any encoding.

    Raises
    ------
    ValueError
        There is no kernel for such weights. Loading a model decodes them.
    """
    hidden, up, last, ids = call.x, call.gate_up, call.down, call.ids
    _require_kernel(up)
    _require_kernel(last)
    tokens, size = hidden.shape
    intermediate = last.inputs
    experts, chosen = len(up.values), ids.shape[1]
    pairs = tokens * chosen
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if pairs == 0:
        return out.zero_()
    order, ends = sort_by_expert(ids, experts)
    activated = hidden.new_empty((pairs, intermediate))
    results = hidden.new_empty((pairs, size))
    tile = tile_of(call)
    blocks = pairs // tile.pairs + min(pairs, experts)
    common = {
        "RUN": INT4_RUN,
        "M": tile.pairs,
        "N": tile.outputs,
        "E": next_power_of_2(experts),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    element = hidden.element_size()
    held = _held(up, element, tile)
    activation, alpha, limit = gating_arguments(call.activation)
    _launch_gate_up(
        (blocks * ceil_div(intermediate, tile.outputs),),
        hidden, up.values, up.scales, up.offsets, call.gate_up_bias, up.order,
        call.weights if call.weighs_inputs else None, order, ends, activated, hidden.stride(0),
        experts, chosen, size, intermediate, held.group, ACTIVATION=activation, ALPHA=alpha,
        LIMIT=limit, KIND=held.kind, K=held.step, **common,
    )  # fmt: skip
    held = _held(last, element, tile)
    _launch_down(
        (blocks * ceil_div(size, tile.outputs),),
        activated, last.values, last.scales, last.offsets, call.down_bias, last.order, order, ends,
        results, experts, intermediate, size, held.group, KIND=held.kind, K=held.step, **common,
    )  # fmt: skip
    _launch_combine(
        (tokens, ceil_div(size, _COMBINED)),
        results, None if call.weighs_inputs else call.weights, ids, out, experts, chosen, size,
        BLOCK=_COMBINED, num_warps=4,
    )  # fmt: skip
    return out
