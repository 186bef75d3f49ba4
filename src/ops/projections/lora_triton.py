# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Low-rank updates by slot, in Triton: inputs to inner results, then inner results to outputs.

Programs are over a tile of tokens and a slot. One whose tokens have other slots leaves at once, so
the grid comes from sizes alone, and a launch can be captured. A program that stays reads its slot's
matrices once for its tokens, and multiplies by nothing what belongs to others.

Sums are in float32. A token's results do not depend on the other tokens of its tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from src.ops.launching_triton import ceil_div, launcher, next_power_of_2
from src.ops.projections.lora import Lora

_TOKENS = 16  # the fewest that a tensor core multiplies
_INPUTS = 64
_OUTPUTS = 64


@triton.jit(do_not_specialize=["slots", "tokens"])
def _project(
    x, down, ranks, slots, inner,
    tokens, inputs, x_stride,
    parts: tl.constexpr, room: tl.constexpr, padded: tl.constexpr,
    block_t: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Inner results [T, parts * room] of the tokens of one slot, for one part."""
    slot = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    token = tl.program_id(0).to(tl.int64) * block_t + tl.arange(0, block_t)
    own = tl.load(slots + token, mask=token < tokens, other=-1) == slot
    rank = tl.load(ranks + slot * parts + part)
    if (tl.sum(own.to(tl.int32), axis=0) > 0) & (rank > 0):
        row = tl.arange(0, padded)
        column = tl.arange(0, block_k)
        weights = down + ((slot * parts + part) * room + row[:, None]) * inputs
        values = x + token[:, None] * x_stride
        sums = tl.zeros((block_t, padded), tl.float32)
        for begin in range(0, inputs, block_k):
            at = begin + column
            within = at < inputs
            a = tl.load(values + at[None, :], mask=own[:, None] & within[None, :], other=0.0)
            b = tl.load(
                weights + at[None, :], mask=(row < rank)[:, None] & within[None, :], other=0.0
            )
            sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
        tl.store(
            inner + token[:, None] * (parts * room) + part * room + row[None, :],
            sums,
            mask=own[:, None] & (row < room)[None, :],
        )


_launch_project = launcher(_project)


@triton.jit(do_not_specialize=["slots", "tokens"])
def _expand(
    base, up, ranks, starts, slots, inner, out,
    tokens, outputs,
    parts: tl.constexpr, room: tl.constexpr, padded: tl.constexpr,
    block_t: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """Outputs of the tokens of one slot; those of slot -1 are the base's."""
    slot = tl.program_id(1).to(tl.int64) - 1
    token = tl.program_id(0).to(tl.int64) * block_t + tl.arange(0, block_t)
    chosen = tl.load(slots + token, mask=token < tokens, other=-2)
    # All negative slots are none.
    own = (token < tokens) & (tl.maximum(chosen, -1) == slot)
    if tl.sum(own.to(tl.int32), axis=0) > 0:
        column = tl.program_id(2) * block_n + tl.arange(0, block_n)
        within = own[:, None] & (column < outputs)[None, :]
        place = token[:, None] * outputs + column[None, :]
        result = tl.load(base + place, mask=within, other=0.0).to(tl.float32)
        if slot >= 0:
            row = tl.arange(0, padded)
            weights = up + (slot * room + row[:, None]) * outputs + column[None, :]
            values = inner + token[:, None] * (parts * room) + row[None, :]
            for part in range(parts):
                rank = tl.load(ranks + slot * parts + part)
                begin = tl.load(starts + part)
                end = tl.load(starts + part + 1)
                of_part = (column >= begin) & (column < end) & (column < outputs)
                if (tl.sum(of_part.to(tl.int32), axis=0) > 0) & (rank > 0):
                    known = row < rank
                    a = tl.load(values + part * room, mask=own[:, None] & known[None, :], other=0.0)
                    b = tl.load(weights, mask=known[:, None] & of_part[None, :], other=0.0)
                    # The inner results stay in float32, as in the reference.
                    result += tl.dot(a, b.to(tl.float32), input_precision="ieee")
        tl.store(out + place, result.to(out.dtype.element_ty), mask=within)


_launch_expand = launcher(_expand)


@Lora.taking_flat
def lora(call: Lora) -> Tensor:
    """Launch the kernels."""
    base, x, down, up = call.base, call.x, call.down, call.up
    ranks, starts, slots = call.ranks, call.starts, call.slots
    (tokens, outputs), inputs = base.shape, x.shape[1]
    (count, parts), room = ranks.shape, up.shape[1]
    out = torch.empty_like(base)
    if not tokens:
        return out
    padded = max(16, next_power_of_2(room))
    inner = torch.empty(tokens, parts * room, dtype=torch.float32, device=base.device)
    tiles = ceil_div(tokens, _TOKENS)
    _launch_project(
        (tiles, count, parts),
        *(x, down, ranks, slots, inner, tokens, inputs, x.stride(0)),
        parts=parts, room=room, padded=padded, block_t=_TOKENS, block_k=_INPUTS,
    )  # fmt: skip
    _launch_expand(
        (tiles, count + 1, ceil_div(outputs, _OUTPUTS)),
        *(base, up, ranks, starts, slots, inner, out, tokens, outputs),
        parts=parts, room=room, padded=padded, block_t=_TOKENS, block_n=_OUTPUTS,
    )  # fmt: skip
    return out
