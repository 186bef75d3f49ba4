"""Whether a device's kernels of drafts work, tried before anybody is served."""

from __future__ import annotations

from typing import Final

import torch

from src.engine.speculation.on_device import Bounds
from src.ops import ACCEPT_DRAFTS, LOOK_UP, accept_drafts, look_up
from src.ops.drafts.accept_drafts import IDLE

# Length, and after how many tokens it repeats itself, of each text. In some nothing is found, and
# some have more places than are looked at.
_TEXTS: Final = ((1, 1), (2, 1), (9, 3), (40, 7), (300, 1), (700, 64), (1500, 5), (1500, 1400))
_ROOM: Final = 1600
_HOST: Final = torch.device("cpu")


def why_not(bounds: Bounds, device: torch.device) -> str | None:
    """What is wrong with the drafts of a device that looks them up; ``None`` if nothing is.

    Drafts are looked up and accepted there, of texts of which something is found and of others, and
    compared with what the definitions of both say. Blocks; kernels are compiled here.
    """
    try:
        for most in sorted({1, 2, bounds.most}):
            if not _finds_drafts(bounds, most, device):
                return f"look_up gives wrong drafts on {device.type}"
            if not _accepts_drafts(most, device):
                return f"accept_drafts accepts wrong drafts on {device.type}"
    # Whatever it is, the model can be served without drafts.
    except Exception as error:
        return f"the kernels of drafts fail on {device.type}: {error}"
    return None


def _finds_drafts(bounds: Bounds, most: int, device: torch.device) -> bool:
    count = len(_TEXTS)
    tokens = torch.full((count, _ROOM), -1, dtype=torch.int32)
    for row, (length, period) in enumerate(_TEXTS):
        tokens[row, :length] = torch.arange(length) % period
    rows = torch.arange(count).flip(0)
    lengths = torch.tensor([length for length, _ in _TEXTS], dtype=torch.int32)[rows]
    wanted = (most - torch.arange(count) % 2).int()
    numbers = (bounds.least, bounds.longest, most)
    found = look_up(
        tokens.to(device), rows.to(device), lengths.to(device), wanted.to(device), *numbers
    )
    expected = LOOK_UP.reference(tokens, rows, lengths, wanted, *numbers, 8192)
    return torch.equal(found.cpu(), expected)


def _accepts_drafts(most: int, device: torch.device) -> bool:
    """Of a row for each number of drafts, and one that computes nothing."""
    counts = torch.arange(IDLE, most + 1, dtype=torch.int32)
    count = len(counts)
    sampled = torch.arange(count)[:, None] + torch.arange(1 + most)
    drafts = sampled[:, :-1].int().contiguous()
    # Each second row has a wrong draft in the middle.
    drafts[::2, most // 2] += 1
    known = torch.arange(1, 1 + count, dtype=torch.int32)
    tokens = torch.zeros((count, count + most + 2), dtype=torch.int32)
    outcomes = []
    for place, accepts in ((_HOST, ACCEPT_DRAFTS.reference), (device, accept_drafts)):
        changed = [
            each.to(place, copy=True)
            for each in (tokens, torch.zeros_like(known), torch.full_like(known, -2))
        ]
        accepts(
            sampled.to(place),
            drafts.to(place),
            counts.to(place),
            known.to(place),
            torch.arange(count, device=place),
            changed[0],
            changed[1],
            changed[2],
        )
        outcomes.append([each.cpu() for each in changed])
    return all(map(torch.equal, *outcomes))
