# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Drafts by look-up on CUDA devices: one kernel finds a row's places, another follows them.

Both have a program per row. They are two kernels because one of them would read what other threads
of its program have just written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from src.ops.drafts.look_up import FOUND_BY, LookUp
from src.ops.launching_triton import launcher

BLOCK = 1024
"""Positions of a row that are looked at together."""

MOST_PLACES = tl.constexpr(128)
MOST_FOLLOWED = tl.constexpr(16)
NO_DRAFT = tl.constexpr(-1)


@triton.jit(do_not_specialize=["rows", "lengths", "wanted"])
def _find_kernel(
    tokens,  # [all_rows, room] int32
    rows,  # [rows] int64
    lengths,  # [rows] int32
    wanted,  # [rows] int32
    places,  # [rows, 128] int32: where the text goes on, the latest first
    matches,  # [rows, 128] int32: how long the match before it is; 0 where there is no place
    room,
    least,
    longest,
    window,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last places of a row's last few tokens, and how much of its end stands there."""
    at = tl.program_id(0)
    text = tokens + tl.load(rows + at) * room
    length = tl.load(lengths + at)
    begin = tl.maximum(length - window, 0)
    # Index of the last token of the latest place, and how many places are possible.
    last = length - 2
    possible = length - begin - FEW
    possible = tl.where((tl.load(wanted + at) > 0) & (length - begin >= least), possible, 0)
    found = 0
    done = 0
    while (done < possible) & (found < MOST_PLACES):
        ends = last - done - tl.arange(0, BLOCK)
        equal = done + tl.arange(0, BLOCK) < possible
        for back in tl.static_range(FEW):
            wants = tl.load(text + length - 1 - back)
            equal &= tl.load(text + ends - back, mask=equal, other=NO_DRAFT) == wants
        is_place = equal.to(tl.int32)
        count = tl.sum(is_place, 0)
        if count > 0:
            match = is_place * FEW
            ahead = least * 0 + FEW
            # Most places are left by all threads at once, long before the longest match.
            while (ahead < longest) & (tl.sum(equal.to(tl.int32), 0) > 0):
                inside = equal & (ends - ahead >= begin)
                wants = tl.load(
                    text + length - 1 - ahead, mask=length - 1 - ahead >= begin, other=0
                )
                has = tl.load(text + ends - ahead, mask=inside, other=NO_DRAFT)
                equal = inside & (has == wants)
                match += equal.to(tl.int32)
                ahead += 1
            rank = found + tl.cumsum(is_place, 0) - is_place
            kept = (is_place > 0) & (rank < MOST_PLACES)
            tl.store(places + at * MOST_PLACES + rank, ends + 1, mask=kept)
            tl.store(matches + at * MOST_PLACES + rank, match, mask=kept)
        found += count
        done += BLOCK
    rest = tl.arange(0, MOST_PLACES)
    tl.store(matches + at * MOST_PLACES + rest, 0, mask=rest >= found)


_launch_find = launcher(_find_kernel)


@triton.jit(do_not_specialize=["rows", "lengths", "wanted", "out"])
def _follow_kernel(
    tokens,
    rows,
    lengths,
    wanted,
    places,
    matches,
    out,  # [rows, 2 + most] int32
    room,
    least,
    most,
):
    """What stands behind the longest matches of a row."""
    at = tl.program_id(0)
    text = tokens + tl.load(rows + at) * room
    length = tl.load(lengths + at)
    every = tl.arange(0, MOST_PLACES)
    match = tl.load(matches + at * MOST_PLACES + every)
    longest = tl.max(match, 0)
    longest = tl.where(longest >= least, longest, 0)
    # No place has a match of this length if there is none: the mask is of tensors alone.
    is_longest = match == tl.where(longest > 0, longest, -1)
    place = tl.load(places + at * MOST_PLACES + every, mask=is_longest, other=0)
    # Bring the latest ones together: slot -> place, the latest first.
    slot = tl.arange(0, MOST_FOLLOWED)
    of = tl.cumsum(is_longest.to(tl.int32), 0) - 1
    mine = is_longest[None, :] & (of[None, :] == slot[:, None])
    follows = tl.sum(mine.to(tl.int32), 1) > 0
    place = tl.sum(tl.where(mine, place[None, :], 0), 1)
    out += at * (2 + most)
    count = 0
    most_wanted = tl.minimum(tl.load(wanted + at), most)
    while (count < most_wanted) & (tl.sum(follows.to(tl.int32), 0) > 0):
        token = tl.load(text + place, mask=follows, other=NO_DRAFT)
        alike = (token[:, None] == token[None, :]) & follows[:, None] & follows[None, :]
        votes = tl.sum(alike.to(tl.int32), 1)
        # Of as many votes the latest place wins, which stands in the lowest slot.
        score = tl.where(follows, votes * MOST_FOLLOWED + MOST_FOLLOWED - 1 - slot, -1)
        chosen = tl.max(tl.where(score == tl.max(score, 0), token, NO_DRAFT), 0)
        tl.store(out + 2 + count, chosen)
        place += 1
        follows = follows & (token == chosen) & (place < length)
        count += 1
    tl.store(out, longest)
    tl.store(out + 1, count)
    rest = count
    while rest < most:
        tl.store(out + 2 + rest, NO_DRAFT)
        rest += 1


_launch_follow = launcher(_follow_kernel)


@LookUp.taking_flat
def run(call: LookUp) -> Tensor:
    """Launch the kernels."""
    count, room, device = len(call.rows), call.tokens.shape[1], call.tokens.device
    out = torch.empty((count, 2 + call.most), dtype=torch.int32, device=device)
    if count == 0:
        return out
    places, matches = torch.empty((2, count, 128), dtype=torch.int32, device=device)
    rows = (call.tokens, call.rows, call.lengths, call.wanted, places, matches)
    _launch_find(
        (count,),
        *rows,
        room,
        call.least,
        call.longest,
        call.window,
        FEW=min(call.least, FOUND_BY),
        BLOCK=BLOCK,
        num_warps=8,
    )
    _launch_follow((count,), *rows, out, room, call.least, call.most, num_warps=4)
    return out
