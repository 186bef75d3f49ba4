"""Rounds a projection's inputs as formats with 8-bit activations say it.

A scale is of one token, or of 128 inputs of a token, or it is fixed. So no token's result depends
on the other tokens of a step, and a scale of a whole step is never used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from src.ops.linear import FLOAT8

_LARGEST_FLOAT8 = 448.0
# compressed-tensors divides by half of the range -128 to 127.
_HALF_OF_INT8 = 127.5


def token_scales(x: Tensor, largest: float, bound: Tensor | None = None) -> Tensor:
    """The scale of each token, float32 [..., 1]: its largest magnitude becomes ``largest``.

    ``bound``, float32 [1], is the most that counts as the largest magnitude.
    """
    most = x.float().abs().amax(dim=-1, keepdim=True)
    if bound is not None:
        most = torch.minimum(most, bound)
    return torch.where(most == 0, 1.0, most / largest)


def float8_scales(x: Tensor, bound: Tensor | None = None) -> Tensor:
    """Scales of tokens for `to_float8`."""
    return token_scales(x, _LARGEST_FLOAT8, bound)


def int8_scales(x: Tensor) -> Tensor:
    """Scales of tokens for `to_int8`."""
    return token_scales(x, _HALF_OF_INT8)


def to_float8(x: Tensor, scales: Tensor) -> Tensor:
    """Inputs divided by scales, as 8-bit floating point numbers."""
    return (x.float() / scales).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(FLOAT8)


def to_int8(x: Tensor, scales: Tensor) -> Tensor:
    """Inputs divided by scales, as integers from -128 to 127 in x's dtype, which holds them."""
    return (x.float() / scales).round().clamp(-128, 127).to(x.dtype)


def rounded_in_blocks(x: Tensor, block: int) -> Tensor:
    """Inputs rounded to 8-bit floating point, with a scale per ``block`` inputs of a token."""
    blocks = x.unflatten(-1, (-1, block))
    scales = float8_scales(blocks)
    return (to_float8(blocks, scales).float() * scales).flatten(-2).to(x.dtype)
