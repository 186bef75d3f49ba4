"""The pieces that every dense decoder is made of, as pure functions on tensors.

Shape suffixes: T tokens of a step, H hidden size, Q query heads, K key/value heads, D head_dim,
I intermediate size, V vocabulary. Upcasts and their order are those of transformers, so that
float32 agrees to rounding and bfloat16 rounds in the same places.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from src import ops
from src.distributed import Group
from src.models.quantization import Weight
from src.ops.linear import INT4_RUN


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`: [T, in] with [out, in] and [out] to [T, out], in x's dtype.

    The one seam through which every projection goes: quantized weights are another method behind
    this call, not another model.
    """
    if isinstance(weight, torch.Tensor):
        # The op has nothing better for rows that are no whole number of runs either.
        is_streamed = x.dtype != torch.float32 and weight.shape[1] % INT4_RUN == 0
        if x.device.type != "cpu" or not is_streamed:
            return functional.linear(x, weight, bias)
        return ops.linear(x, weight, None, bias)
    return ops.linear(x, weight.values, weight.scales, bias)


def row_parallel_linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, group: Group
) -> torch.Tensor:
    """A projection whose input dimension is sharded: partial sums are reduced over the group.

    The bias is added once, by rank 0, before the sum.
    """
    return group.all_reduce(linear(x, weight, bias if group.rank == 0 else None))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalization over the last dimension (Zhang and Sennrich 2019).

    Normalized in float32, rounded to x's dtype, then scaled. x [..., N], weight [N].
    """
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def apply_rope(x_thd: torch.Tensor, cos_sin_td: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of each head by its token's angles.

    Args:
        x_thd: queries or keys, [T, heads, D].
        cos_sin_td: rows of the RoPE table for the tokens' positions, [T, D] in x's dtype.
    """
    cos, sin = cos_sin_td.unsqueeze(1).chunk(2, dim=-1)
    first, second = x_thd.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of a fused projection: [T, 2 I], gate first, to [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
