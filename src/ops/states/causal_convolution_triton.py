# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The causal convolution on CUDA devices: a program per token, then one per row for its state.

Grids come from sizes alone, so that the launches can be captured. States are written by a kernel of
its own, because tokens of other programs read them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from src.ops.launching_triton import ceil_div, launcher
from src.ops.rows_triton import row_of

_CHANNELS = 512  # of one program


# Alignments that vary from step to step select no other variant.
@triton.jit(do_not_specialize=["slots", "query_start_loc", "rows"])
def _convolve_kernel(
    x,  # [tokens, channels], rows x_stride apart
    weight,  # [TAPS, channels]
    bias,  # [channels], or None
    states,  # [slots, TAPS - 1, channels], slots states_stride apart
    slots,  # [rows] int64
    query_start_loc,  # [rows + 1] int32
    out,  # [tokens, channels]
    x_stride,
    states_stride,
    rows,
    channels,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one token; 0 for padding."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    to = out + token.to(tl.int64) * channels + channel
    if token >= tl.load(query_start_loc + rows):
        tl.store(to, tl.zeros([BLOCK], dtype=out.dtype.element_ty), mask=inside)
    else:
        row = row_of(query_start_loc, rows, token)
        begin = tl.load(query_start_loc + row)
        state = states + tl.load(slots + row) * states_stride + channel
        sums = tl.zeros([BLOCK], dtype=tl.float32)
        if bias is not None:
            sums += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        for tap in tl.static_range(TAPS):
            # The place among the state's inputs and then the row's.
            place = token - begin + tap
            if place < TAPS - 1:
                value = tl.load(state + place * channels, mask=inside, other=0.0)
            else:
                seen = (begin + place - (TAPS - 1)).to(tl.int64)
                value = tl.load(x + seen * x_stride + channel, mask=inside, other=0.0)
            factor = tl.load(weight + tap * channels + channel, mask=inside, other=0.0)
            sums += factor.to(tl.float32) * value.to(tl.float32)
        if SILU:
            sums = sums / (1.0 + tl.exp(-sums))
        tl.store(to, sums.to(out.dtype.element_ty), mask=inside)


_launch_convolve = launcher(_convolve_kernel)


@triton.jit(do_not_specialize=["slots", "query_start_loc"])
def _keep_kernel(
    x,
    states,
    slots,
    query_start_loc,
    x_stride,
    states_stride,
    channels,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one row: its last inputs become its state."""
    row = tl.program_id(0)
    begin = tl.load(query_start_loc + row)
    count = tl.load(query_start_loc + row + 1) - begin
    if count > 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < channels
        state = states + tl.load(slots + row) * states_stride + channel
        # It reads behind what it has written, once all threads have read what is written next.
        for kept in tl.static_range(TAPS - 1):
            place = count + kept
            if place < TAPS - 1:
                value = tl.load(state + place * channels, mask=inside, other=0.0)
            else:
                seen = (begin + place - (TAPS - 1)).to(tl.int64)
                value = tl.load(x + seen * x_stride + channel, mask=inside, other=0.0)
            tl.debug_barrier()
            tl.store(state + kept * channels, value, mask=inside)


_launch_keep = launcher(_keep_kernel)


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    silu: bool = True,
) -> None:
    """Launch the kernels; arguments as in `causal_convolution`."""
    (tokens, channels), rows, taps = x.shape, len(slots), len(weight)
    blocks = ceil_div(channels, _CHANNELS)
    if tokens == 0:
        return
    _launch_convolve(
        (tokens, blocks),
        x, weight, bias, states, slots, query_start_loc, out, x.stride(0), states.stride(0), rows,
        channels, TAPS=taps, SILU=silu, BLOCK=_CHANNELS, num_warps=4,
    )  # fmt: skip
    if rows and taps > 1:
        _launch_keep(
            (rows, blocks),
            x, states, slots, query_start_loc, x.stride(0), states.stride(0), channels,
            TAPS=taps, BLOCK=_CHANNELS, num_warps=4,
        )  # fmt: skip
