"""`causal_convolution`: each channel is convolved with its own last few inputs; SiLU may follow.

The inputs before a chunk come from a state per sequence, which then becomes the chunk's last ones.
So chunks give what one pass gives.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from src.ops.declaration import Case, Cost, Op
from src.ops.records import Record, number, tensor

MAX_TAPS: Final = 16
"""The most inputs that a kernel sees at a time; kMostTaps of recurrence.cpp. Models have 4."""


class CausalConvolution(Record):
    """`silu(bias + sum_j weight[j] * x[t - K + 1 + j])` for every token and channel.

    Sums are in float32 and rounded once, behind the activation if there is one.

    Attributes
    ----------
    x
        [T, C] float32, bfloat16 or float16, last dimension contiguous.
    weight
        [K, C] of x's dtype, contiguous, K at most `MAX_TAPS`; the last tap belongs to the token
        itself.
    bias
        [C] of x's dtype, contiguous, or None.
    states
        [slots, K - 1, C] of x's dtype, changed: the last inputs of each sequence, the oldest first.
        A slot's states are contiguous.
    slots
        [B] int64, contiguous: the slot of each row, each another one. Rows without tokens, as
        captured steps are padded with, may name any, and the same.
    query_start_loc
        [B + 1] int32: first token of each row. Tokens behind the last are padding.
    out
        [T, C] of x's dtype, written, contiguous; padding becomes 0.
    silu
        Whether SiLU follows; without it the sums are the result.
    """

    x: Tensor = tensor("tokens channels", rows=True)
    weight: Tensor = tensor("taps channels")
    bias: Tensor | None = tensor("channels")
    states: Tensor = tensor("num_slots taps-1 channels", rows=True, changed=True)
    slots: Tensor = tensor("rows", torch.int64)
    query_start_loc: Tensor = tensor("rows+1", torch.int32)
    out: Tensor = tensor("tokens channels", changed=True)
    silu: bool = number(default=True)


def reference(call: CausalConvolution) -> None:
    """See `CausalConvolution`."""
    x, weight, bias, states, slots, query_start_loc, out, silu = call
    bounds, taps = query_start_loc.tolist(), len(weight)
    out[bounds[-1] :] = 0
    for row, slot in enumerate(slots.tolist()):
        tokens = slice(bounds[row], bounds[row + 1])
        count = tokens.stop - tokens.start
        if not count:
            continue
        seen = torch.cat((states[slot], x[tokens]))  # [K - 1 + L, C]
        sums = torch.zeros(count, x.shape[1], device=x.device)
        if bias is not None:
            sums = sums + bias.float()
        for tap in range(taps):
            sums = sums + weight[tap].float() * seen[tap : tap + count].float()
        out[tokens] = (functional.silu(sums) if silu else sums).to(out.dtype)
        states[slot] = seen[count:]


def _build(
    device: str,
    *,
    rows: tuple[int, ...] = (1, 5),
    padding: int = 0,
    channels: int = 40,
    taps: int = 4,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = True,
    silu: bool = True,
    seed: int = 0,
) -> CausalConvolution:
    """Inputs are a slice of a fused tensor, slots in random order; NaN where nothing is read."""
    random = torch.Generator().manual_seed(seed)
    tokens, total = sum(rows), sum(rows) + padding
    fused = torch.randn(total, channels + 8, generator=random)
    fused[tokens:] = torch.nan
    memory = torch.full((len(rows) + 2, (taps - 1) * channels + 16), torch.nan, dtype=dtype)
    slots = torch.randperm(len(memory), generator=random)[: len(rows)]
    memory[slots] = torch.randn(len(rows), memory.shape[1], generator=random).to(dtype)
    slots = torch.where(torch.tensor(rows) > 0, slots, len(memory))
    bounds = torch.tensor((0, *rows)).cumsum(0).to(torch.int32)
    bias = torch.randn(channels, generator=random).to(device, dtype)
    return CausalConvolution(
        x=fused.to(device, dtype)[:, 8:],
        weight=torch.randn(taps, channels, generator=random).to(device, dtype),
        bias=bias if has_bias else None,
        states=memory.to(device)[:, 16:].unflatten(1, (taps - 1, channels)),
        slots=slots.to(device),
        query_start_loc=bounds.to(device),
        out=torch.full((total, channels), torch.nan, dtype=dtype, device=device),
        silu=silu,
    )


def _grid() -> list[Case]:
    cases: list[Case] = [
        {"dtype": dtype, "channels": channels, "has_bias": has_bias, "padding": 1, "taps": taps}
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for channels, taps, has_bias in ((8, 4, True), (40, 2, False), (600, 4, False))
    ]
    cases += [{"rows": (1, 2, 3, 90)}, {"rows": (0, 3, 0)}, {"rows": (0,), "padding": 2}]
    cases += [
        {"dtype": dtype, "taps": 3, "has_bias": has_bias, "silu": False}
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for has_bias in (True, False)
    ]
    return [*cases, {"rows": ()}]


def _cost(call: CausalConvolution) -> Cost:
    x, weight, slots = call.x, call.weight, call.slots
    tokens, channels = int(call.query_start_loc[-1]), x.shape[1]
    moved = 2 * tokens * channels + weight.numel() + 2 * len(slots) * (len(weight) - 1) * channels
    return Cost(bytes=moved * x.element_size(), flops=2 * len(weight) * tokens * channels)


CAUSAL_CONVOLUTION = Op(
    "causal_convolution",
    CausalConvolution,
    reference=reference,
    build=_build,
    cases=_grid(),
    cost=_cost,
    lazy={"cuda": "src.ops.states.causal_convolution_triton:run"},
)

causal_convolution = CAUSAL_CONVOLUTION.function
"""The op as a function of its record's fields: of `CausalConvolution`."""
