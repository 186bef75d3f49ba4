"""Compares drafts with the tokens that the model draws at their positions, and ends the rows there.

A draft is accepted while it equals the model's own token, which is drawn with that position's noise
(accept-if-equal with shared noise, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from src.ops.declaration import Cost, Op
from src.ops.records import Record, tensor

REJECTED: Final = -1
"""What stands in a row in place of a rejected draft: no token."""
IDLE: Final = -1
"""In place of a number of drafts: the row computes nothing."""


class AcceptDrafts(Record):
    """Count the sampled tokens of each row that hold, and write them into the row.

    The first sampled token of a row holds. So does each further one behind a draft that equals the
    token sampled in its place, unless it is negative, which means that there was no choice: the
    next step finds that out again. Behind what holds, rejected drafts give way to -1.

    It can be called again with other ``sampled`` for the same drafts: it reads nothing that it has
    changed. Negative tokens are written as 0, because the next step in flight still reads the row.

    Attributes
    ----------
    sampled
        [B, W] int64: entry j of a row was sampled behind j of its drafts; more than its drafts and
        one are not read.
    drafts
        [B, W - 1] int32.
    counts
        [B] int32: how many drafts the row has; -1: it computes nothing, and is left as it is.
    known
        [B] int32: the row's number of tokens before, without drafts.
    rows
        [B] int64.
    tokens
        [R, L] int32: (row, position) -> token id.
    lengths
        [R] int32: row -> its number of tokens.
    kept
        [B] int32: how many of the row's sampled tokens hold; 0 if it computes nothing.
    """

    sampled: Tensor = tensor("rows width", torch.int64, rows=True)
    drafts: Tensor = tensor("rows width-1", torch.int32, rows=True)
    counts: Tensor = tensor("rows", torch.int32)
    known: Tensor = tensor("rows", torch.int32)
    rows: Tensor = tensor("rows", torch.int64)
    tokens: Tensor = tensor("all_rows room", torch.int32, changed=True)
    lengths: Tensor = tensor("all_rows", torch.int32, changed=True)
    kept: Tensor = tensor("rows", torch.int32, changed=True)


def reference(call: AcceptDrafts) -> None:
    """See `AcceptDrafts`."""
    for at, (row, count, known) in enumerate(
        zip(call.rows.tolist(), call.counts.tolist(), call.known.tolist(), strict=True)
    ):
        call.kept[at] = 0
        if count == IDLE:
            continue
        sampled, drafts = call.sampled[at].tolist(), call.drafts[at].tolist()
        kept = 1
        while kept <= count and drafts[kept - 1] == sampled[kept - 1] and sampled[kept] >= 0:
            kept += 1
        written = [max(0, token) for token in sampled[:kept]] + [REJECTED] * (1 + count - kept)
        call.tokens[row, known : known + 1 + count] = call.tokens.new_tensor(written)
        call.lengths[row] = known + kept
        call.kept[at] = kept


def _build(
    device: str,
    *,
    counts: Sequence[int],
    width: int = 5,
    kinds: int = 2,
    seed: int = 0,
) -> AcceptDrafts:
    """Random drafts, some of which are right; poison where nothing may be read."""
    random = torch.Generator().manual_seed(seed)
    rows, room = len(counts), 40
    count_b = torch.tensor(counts, dtype=torch.int32)
    place = torch.arange(width)
    # A token in eight is none: there was no choice.
    sampled = torch.randint(kinds, (rows, width), generator=random)
    sampled[torch.rand(sampled.shape, generator=random) < 1 / 8] = -1
    drafts = torch.randint(kinds, (rows, width - 1), generator=random).int()
    # What is not read would be accepted.
    sampled[place > count_b[:, None]] = 99
    drafts[place[:-1] >= count_b[:, None]] = 99
    known = torch.randint(1, room - width, (rows,), generator=random).int()
    tokens = torch.randint(kinds, (rows + 2, room), generator=random).int()
    return AcceptDrafts(
        sampled=sampled.to(device),
        drafts=drafts.to(device),
        counts=count_b.to(device),
        known=known.to(device),
        rows=torch.randperm(rows + 2, generator=random)[:rows].to(device),
        tokens=tokens.to(device),
        lengths=torch.full((rows + 2,), 7, dtype=torch.int32).to(device),
        kept=torch.full((rows,), 99, dtype=torch.int32).to(device),
    )


def _cost(call: AcceptDrafts) -> Cost:
    rows, width = call.sampled.shape
    return Cost(bytes=rows * (16 * width + 24), flops=0)


ACCEPT_DRAFTS = Op(
    "accept_drafts",
    AcceptDrafts,
    reference=reference,
    build=_build,
    cases=[
        {"counts": counts, "kinds": kinds, "width": width, "seed": seed}
        for seed, (width, counts) in enumerate(
            [
                (5, (4, 3, 2, 1, 0, -1) * 4),
                (2, (1, 0, -1, 1) * 3),
                (17, (16, 9, 0, -1, 15) * 2),
                (1, (0, 0, -1)),
                (5, ()),
            ]
        )
        for kinds in (1, 2)
    ],
    cost=_cost,
    lazy={"cuda": "src.ops.drafts.accept_drafts_triton:run"},
)

accept_drafts = ACCEPT_DRAFTS.function
"""The op as a function of the fields of `AcceptDrafts`."""
