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

# at::internal::GRAIN_SIZE: what torch computes elementwise in one thread.
_UNCUT_ELEMENTS = 32768


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`: [T, in] with [out, in] and [out] to [T, out], in x's dtype.

    The one seam through which every projection goes: quantized weights are another method behind
    this call, not another model. On the CPU the compiled kernel sums a token's
    result in an order that does not depend on the others.
    """
    if not isinstance(weight, torch.Tensor):
        return ops.linear(x, weight.values, weight.scales, bias)
    if x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    return ops.linear(x, weight, None, bias)


def row_parallel_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    group: Group,
) -> torch.Tensor:
    """A projection whose input dimension is sharded: partial sums are reduced over the group.

    The bias is added once, by rank 0, before the sum.
    """
    own = bias if group.rank == 0 else None
    return group.all_reduce(linear(x, weight, own))


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


def silu_and_mul(gate_up: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
    """`silu(gate) * up` of a fused projection: [T, 2 I], gate first, to [T, I].

    `deterministic` asks for results that no other token changes.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if not deterministic or torch.compiler.is_compiling():
        return functional.silu(gate) * up
    # Where torch cuts a large tensor for its threads, in the middle of a row, its vectors end, and
    # the elements left over go through another exp. So it gets tensors that it does not cut.
    rows = max(1, _UNCUT_ELEMENTS // gate.shape[1])
    return torch.cat([functional.silu(part) for part in gate.split(rows)]) * up
