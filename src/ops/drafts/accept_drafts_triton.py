# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Acceptance of drafts on CUDA devices: a program per row."""

from __future__ import annotations

import triton
import triton.language as tl

from src.ops.drafts.accept_drafts import AcceptDrafts
from src.ops.launching_triton import launcher, next_power_of_2

REJECTED = tl.constexpr(-1)


# Counts and lengths are slices of a step's numbers, whose alignment must select no other variant.
@triton.jit(do_not_specialize=["sampled", "drafts", "counts", "known", "rows", "kept"])
def _accept_kernel(
    sampled,  # [rows, width] int64, rows sampled_stride apart
    drafts,  # [rows, width - 1] int32, rows drafts_stride apart
    counts,  # [rows] int32
    known,  # [rows] int32
    rows,  # [rows] int64
    tokens,  # [all_rows, room] int32
    lengths,  # [all_rows] int32
    kept,  # [rows] int32
    sampled_stride,
    drafts_stride,
    room,
    WIDTH: tl.constexpr,
):
    at = tl.program_id(0)
    count = tl.load(counts + at)
    if count < 0:
        tl.store(kept + at, 0)
        return
    place = tl.arange(0, WIDTH)
    exists = place <= count
    token = tl.load(sampled + at * sampled_stride + place, mask=exists, other=0)
    behind = tl.load(sampled + at * sampled_stride + place + 1, mask=place < count, other=0)
    draft = tl.load(drafts + at * drafts_stride + place, mask=place < count, other=0)
    # The first place behind which nothing holds: a wrong draft, or the last token.
    right = (place < count) & (draft == token) & (behind >= 0)
    holds = 1 + tl.min(tl.where(right, WIDTH, place), 0)
    row, length = tl.load(rows + at), tl.load(known + at)
    written = tl.where(place < holds, tl.maximum(token, 0), REJECTED)
    tl.store(tokens + row * room + length + place, written.to(tl.int32), mask=exists)
    tl.store(lengths + row, length + holds)
    tl.store(kept + at, holds)


_launch = launcher(_accept_kernel)


@AcceptDrafts.taking_flat
def run(call: AcceptDrafts) -> None:
    """Launch the kernel."""
    count, width = call.sampled.shape
    if count == 0:
        return
    _launch(
        (count,),
        *call,
        call.sampled.stride(0),
        call.drafts.stride(0),
        call.tokens.shape[1],
        WIDTH=next_power_of_2(width),
        num_warps=1,
    )
