"""The sum of a projection's result and the low-rank updates that tokens have chosen (LoRA).

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models". An update is
``x @ down.T @ up``. Many updates lie in memory at once, one per *slot*, and each token names the
slot of its own, or none. A fused projection has several *parts* along its outputs, each with a
``down`` of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from src.ops.declaration import Cost, Op
from src.ops.records import Record, result, tensor

NO_SLOT = -1
"""The slot of a token without an update."""


class Lora(Record, result=result("out", "tokens outputs", like="base")):
    """`base + x @ down.T @ up`, with the `down` and the `up` of each token's slot.

    Sums are in float32, and the result is rounded once. A token's result does not depend on the
    other tokens.

    Attributes
    ----------
    base
        [T, N], contiguous: what the projection gives without an update.
    x
        [T, K] in base's dtype, last dimension contiguous: the projection's inputs.
    down
        [S, P * R, K], contiguous, in base's dtype: rows of P parts, R of each.
    up
        [S, R, N], contiguous, in base's dtype. A part's columns belong to its rows of `down`.
    ranks
        int32 [S, P]: how many of its R rows a part has; nothing behind them is read. 0: the part
        has no update.
    starts
        int32 [P + 1]: the first column of each part, and N.
    slots
        int64 [T], below S; negative: this token has no update.

    Returns
    -------
    [T, N] in base's dtype.
    """

    base: Tensor = tensor("tokens outputs")
    x: Tensor = tensor("tokens inputs", rows=True)
    down: Tensor = tensor("num_slots parts*room inputs")
    up: Tensor = tensor("num_slots room outputs")
    ranks: Tensor = tensor("num_slots parts", torch.int32)
    starts: Tensor = tensor("parts+1", torch.int32)
    slots: Tensor = tensor("tokens", torch.int64)


def reference(call: Lora) -> Tensor:
    """See `Lora`."""
    base, x, down, up = call.base, call.x, call.down, call.up
    ranks, starts, slots = call.ranks, call.starts, call.slots
    room, bounds = up.shape[1], starts.tolist()
    sums = base.float().clone()
    for slot in sorted({slot for slot in slots.tolist() if slot >= 0}):
        tokens = (slots == slot).nonzero().squeeze(1)
        inputs = x[tokens].float()
        for part, rank in enumerate(ranks[slot].tolist()):
            first, begin, end = part * room, bounds[part], bounds[part + 1]
            inner = inputs @ down[slot, first : first + rank].float().T
            sums[tokens, begin:end] += inner @ up[slot, :rank, begin:end].float()
    return sums.to(base.dtype)


def _build(
    device: str,
    *,
    slots: Sequence[int],
    inputs: int,
    parts: Sequence[int],
    ranks: Sequence[Sequence[int]],
    room: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Lora:
    """Random arguments: the slot of each token, outputs of each part, ranks of [slot][part].

    What is behind a rank is NaN.
    """
    random = torch.Generator().manual_seed(seed)
    outputs, count = sum(parts), len(ranks)
    base = torch.randn(len(slots), outputs, generator=random)
    x = torch.randn(len(slots), inputs, generator=random)
    down = torch.randn(count, len(parts), room, inputs, generator=random) * inputs**-0.5
    up = torch.randn(count, room, outputs, generator=random)
    starts = [sum(parts[:number]) for number in range(len(parts) + 1)]
    for slot, of_slot in enumerate(ranks):
        for part, rank in enumerate(of_slot):
            down[slot, part, rank:] = torch.nan
            up[slot, rank:, starts[part] : starts[part + 1]] = torch.nan
    wide = (base, x, down.flatten(1, 2), up)
    moved = [each.to(dtype).to(device) for each in wide]
    return Lora(
        base=moved[0],
        x=moved[1],
        down=moved[2],
        up=moved[3],
        ranks=torch.tensor([list(of_slot) for of_slot in ranks], dtype=torch.int32).to(device),
        starts=torch.tensor(starts, dtype=torch.int32).to(device),
        slots=torch.tensor(list(slots), dtype=torch.int64).to(device),
    )


def _cost(call: Lora) -> Cost:
    """Each chosen update is read once; a token without one is copied."""
    base, x, down, _, ranks, starts, slots = call
    sizes = (starts[1:] - starts[:-1]).tolist()
    moved, flops = 2 * base.nbytes, 0
    chosen = slots.tolist()
    for slot in {each for each in chosen if each >= 0}:
        tokens = chosen.count(slot)
        moved += x.element_size() * tokens * x.shape[1]
        for rank, size in zip(ranks[slot].tolist(), sizes, strict=True):
            moved += down.element_size() * rank * (x.shape[1] + size)
            flops += 2 * tokens * rank * (x.shape[1] + size)
    return Cost(bytes=moved, flops=flops)


LORA = Op(
    "lora",
    Lora,
    reference=reference,
    build=_build,
    cases=[
        {
            "slots": slots,
            "inputs": inputs,
            "parts": parts,
            "ranks": ranks,
            "room": room,
            "dtype": dtype,
            "seed": len(slots) + inputs,
        }
        # One token; nobody has an update; slots in no order, with tokens that have none between
        # them; parts that a slot leaves out; sizes that no vector divides.
        for slots, inputs, parts, ranks, room in [
            ([1], 64, (48,), [[8], [8]], 8),
            ([-1, -1, -1], 32, (32,), [[4]], 4),
            ([0, -1, 1, 0, 0, -2, 0, 1, 0, 0], 96, (64, 32, 32), [[16, 16, 16], [4, 0, 8]], 16),
            ([2, 2, 0, 2, 2, 2, -1], 35, (33, 7), [[0, 3], [1, 1], [5, 0]], 6),
            ([0] * 70 + [1] * 3, 257, (130, 65), [[64, 64], [1, 2]], 64),
        ]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ],
    cost=_cost,
    lazy={"cuda": "src.ops.projections.lora_triton:lora"},
)

lora = LORA.function
"""The op as a function of the fields of `Lora`."""
