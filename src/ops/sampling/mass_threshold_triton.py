# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Thresholds by mass on CUDA devices: one program per row, in one launch.

The keys of floating-point numbers are integers of the same order. The mass above a key falls with
it, so the threshold is found by a k-ary search over the keys (B. Schlegel, R. Gemulla, W. Lehner,
"k-ary search on modern processors", DaMoN 2009; FlashInfer's sampling kernels search with two
pivots): each pass over the row sums the mass above each of PIVOTS keys. There are no histograms in
memory and no atomics. Sums are of integers, so they are the reference's to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from src.ops.launching_triton import launcher
from src.ops.sampling.mass_threshold import MassThreshold

BLOCK = 2048
"""Values that a program reads at once."""
PIVOTS = 4
"""Two bits of the key per pass. With more the sums take longer than reading."""
WARPS = 16

_UNITS = tl.constexpr(17179869184.0)  # UNITS_PER_WEIGHT
_LEAST = tl.constexpr(-2147483649)  # below each key
_MOST = tl.constexpr(2147483647)
_KEY_OF_ONE = tl.constexpr(1065353216)  # the bits of 1.0


@triton.jit
def _keys(values, at, vocab_size):
    bits = tl.load(values + at, mask=at < vocab_size, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _masses(weights, at, vocab_size):
    if weights is None:
        return (at < vocab_size).to(tl.int64)
    else:
        return (tl.load(weights + at, mask=at < vocab_size, other=0.0) * _UNITS).to(tl.int64)


# `shares` may be a part of another tensor: its alignment must not select another variant.
@triton.jit(do_not_specialize=["shares"])
def _threshold_kernel(
    values,  # [rows, vocab_size] float32, rows values_stride apart
    weights,  # [rows, vocab_size] float32, or None
    shares,  # [rows] float64
    thresholds,  # [rows] float32
    values_stride,
    weights_stride,
    vocab_size,
    WITHIN_ONE: tl.constexpr,  # whether all values are in [0, 1]
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the smallest key above which there is less mass than the target."""
    row = tl.program_id(0).to(tl.int64)
    values += row * values_stride
    target = tl.load(shares + row)
    if weights is not None:
        weights += row * weights_stride
        sums = tl.zeros([BLOCK], dtype=tl.int64)
        for begin in range(0, vocab_size, BLOCK):
            sums += _masses(weights, begin + tl.arange(0, BLOCK), vocab_size)
        target *= tl.sum(sums, 0).to(tl.float64)
    # Above `low` there is at least the target, above `high` less.
    low = row * 0 + (-1 if WITHIN_ONE else _LEAST)
    high = row * 0 + (_KEY_OF_ONE if WITHIN_ONE else _MOST)
    while high - low > 1:
        step = (high - low + PIVOTS - 1) // PIVOTS
        pivots = tl.minimum(low + step * (1 + tl.arange(0, PIVOTS)), high)
        compared = pivots.to(tl.int32)[:, None]
        parts = tl.zeros([PIVOTS, BLOCK], dtype=tl.int64)
        for begin in range(0, vocab_size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            masses = _masses(weights, at, vocab_size)
            keys = _keys(values, at, vocab_size)
            parts += tl.where(keys[None, :] > compared, masses[None, :], 0)
        is_less = tl.sum(parts, 1).to(tl.float64) < target
        low = tl.max(tl.where(is_less, low, pivots), 0)
        high = tl.min(tl.where(is_less, pivots, high), 0)
    key = high.to(tl.int32)
    threshold = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    tl.store(thresholds + row, tl.where(target > 0, threshold, float("nan")))


_launch_threshold = launcher(_threshold_kernel)


@MassThreshold.taking_flat
def run(call: MassThreshold) -> Tensor:
    """Launch the kernel."""
    values, weights, shares = call.values, call.weights, call.shares
    rows, vocab_size = values.shape
    thresholds = torch.empty(rows, dtype=torch.float32, device=values.device)
    if rows == 0:
        return thresholds
    # The values of top-p are its weights.
    within_one = weights is not None and weights.data_ptr() == values.data_ptr()
    _launch_threshold(
        (rows,),
        values, weights, shares, thresholds, values.stride(0),
        0 if weights is None else weights.stride(0), vocab_size,
        WITHIN_ONE=within_one, PIVOTS=PIVOTS, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return thresholds
