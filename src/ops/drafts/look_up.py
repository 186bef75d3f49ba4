"""Guesses, for all rows at once, that a text goes on as it did when its end stood in it before.

This is `engine.speculation.lookup` for a device whose tokens the host has not seen yet. Nothing is
kept between calls, so no preemption and no rejected draft leaves anything behind. (Prompt lookup
decoding, A. Saxena, 2023; suffix decoding, arXiv 2411.04975.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from src.ops.declaration import Cost, Op
from src.ops.records import Record, number, result, tensor

FOUND_BY: Final = 4
"""Tokens that a place is first found by, at most."""
MOST_PLACES: Final = 128
"""The most places whose matches are measured, the latest ones."""
MOST_FOLLOWED: Final = 16
"""The most places of the longest match that are followed, the latest ones."""
NO_DRAFT: Final = -1
"""What stands in place of a draft where there is none."""


class LookUp(Record, result=result("found", "rows 2+most", like="tokens")):
    """Find the longest end of each row's tokens that stands in them before, and what follows it.

    Of the last `window` tokens of a row, the last 128 places are looked at where its last tokens
    stand, `least` of them and at most 4. The longest matches of these, not told apart beyond
    `longest` tokens, are followed, the last 16. Each draft is the token that most of them have,
    or of several such tokens the one that stood there last; who had another is followed no more.

    Attributes
    ----------
    tokens
        [R, L] int32: (row, position) -> token id, valid below the row's length.
    rows
        [B] int64: the rows that are asked for.
    lengths
        [B] int32: their numbers of tokens.
    wanted
        [B] int32: the most drafts of each. A row that wants none is not looked at.
    least, longest
        The fewest tokens that a match has, and the most that it needs.
    most
        The largest of ``wanted`` that is possible.
    window
        How many of a row's last tokens are looked at.

    Returns
    -------
    int32 [B, 2 + most]: the length of the match, 0 if there is none; the number of drafts; the
        drafts, and -1 behind them.
    """

    tokens: Tensor = tensor("all_rows room", torch.int32)
    rows: Tensor = tensor("rows", torch.int64)
    lengths: Tensor = tensor("rows", torch.int32)
    wanted: Tensor = tensor("rows", torch.int32)
    least: int = number()
    longest: int = number()
    most: int = number()
    window: int = number(default=8192)


def reference(call: LookUp) -> Tensor:
    """See `LookUp`."""
    found = []
    asked = zip(call.rows.tolist(), call.lengths.tolist(), call.wanted.tolist(), strict=True)
    for row, length, wanted in asked:
        begin = max(0, length - call.window)
        text = call.tokens[row, begin:length].tolist() if wanted > 0 else []
        match, places = _longest_match(text, call.least, call.longest)
        drafts = _followed(text, places[-MOST_FOLLOWED:], wanted)
        found.append([match, len(drafts), *drafts, *[NO_DRAFT] * (call.most - len(drafts))])
    return torch.tensor(found, dtype=torch.int32, device=call.tokens.device).view(
        len(found), 2 + call.most
    )


def _longest_match(text: Sequence[int], least: int, longest: int) -> tuple[int, list[int]]:
    """The longest match of the text's end, and the places behind where it stands, ascending."""
    few, size = min(least, FOUND_BY), len(text)
    if size < least:
        return 0, []
    ends = [end for end in range(few, size) if text[end - few : end] == text[size - few :]]
    lengths = {}
    for end in ends[-MOST_PLACES:]:
        most = min(longest, end)
        differing = (back for back in range(most) if text[end - 1 - back] != text[size - 1 - back])
        lengths[end] = next(differing, most)
    match = max(lengths.values(), default=0)
    if match < least:
        return 0, []
    return match, [end for end, length in lengths.items() if length == match]


def _followed(text: Sequence[int], places: Sequence[int], most: int) -> list[int]:
    """What most of the places have next, token by token."""
    drafts: list[int] = []
    while places and len(drafts) < most:
        votes: dict[int, list[int]] = {}
        for place in places:
            votes.setdefault(text[place], []).append(place)
        chosen = max(votes, key=lambda token: (len(votes[token]), max(votes[token])))
        drafts.append(chosen)
        places = [place + 1 for place in votes[chosen] if place + 1 < len(text)]
    return drafts


def _fake(call: LookUp) -> Tensor:
    return call.tokens.new_empty((call.rows.shape[0], 2 + call.most))


def _build(
    device: str,
    *,
    lengths: Sequence[int],
    kinds: int = 3,
    least: int = 1,
    longest: int = 24,
    most: int = 6,
    window: int = 8192,
    wanted: int | None = None,
    period: int = 0,
    seed: int = 0,
) -> LookUp:
    """Random texts of ``kinds`` tokens, or those of a ``period``; poison behind their ends.

    ``wanted=None`` makes each row ask for another number of drafts.
    """
    random = torch.Generator().manual_seed(seed)
    count, room = len(lengths), max(lengths, default=0) + most + 1
    tokens = torch.randint(kinds, (count + 2, room), generator=random).int()
    if period:
        tokens[:] = torch.arange(room) % period
    rows = torch.randperm(count + 2, generator=random)[:count]
    for row, length in zip(rows.tolist(), lengths, strict=True):
        tokens[row, length:] = -1
    asks = torch.arange(count) % (most + 1) if wanted is None else torch.full((count,), wanted)
    return LookUp(
        tokens=tokens.to(device),
        rows=rows.to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32).to(device),
        wanted=asks.int().to(device),
        least=least,
        longest=longest,
        most=most,
        window=window,
    )


def _cost(call: LookUp) -> Cost:
    # Each row's window is read once. How much of it is read again depends on what stands in it.
    count, room = call.rows.shape[0], call.tokens.shape[1]
    return Cost(bytes=count * (4 * min(room, call.window) + 4 * (2 + call.most)), flops=0)


_CASES: list[dict[str, Any]] = [
    {"lengths": lengths, "kinds": kinds, "least": least, "longest": longest, "seed": seed}
    for seed, (least, longest) in enumerate([(1, 1), (1, 24), (2, 5), (3, 24), (5, 24), (7, 9)])
    for kinds, lengths in ((2, (1, 2, 3, 9, 40, 41, 300)), (20, (0, 5, 64, 700, 33)))
] + [
    # More places than are looked at, and more than are followed; ends of the window inside.
    {"lengths": (40, 500, 1500, 2000), "period": period, "least": 3, "wanted": 6, "window": 1100}
    for period in (1, 2, 7, 600)
] + [
    {"lengths": (300, 1300), "kinds": 2, "least": 4, "longest": 64, "most": 16, "window": 1024},
    {"lengths": ()},
    {"lengths": (50, 60), "wanted": 0},
]  # fmt: skip

LOOK_UP = Op(
    "look_up",
    LookUp,
    reference=reference,
    fake=_fake,
    build=_build,
    cases=_CASES,
    cost=_cost,
    lazy={"cuda": "src.ops.drafts.look_up_triton:run"},
)

look_up = LOOK_UP.function
"""The op as a function of the fields of `LookUp`."""
