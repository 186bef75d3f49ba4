"""Functions for a compiler's process, which finds them by name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from src import ops
from src.ops.matrix import Matrix


class Mixed(NamedTuple):
    """Two results of different dtypes."""

    gated: Tensor
    shifted: Tensor


class Weights(NamedTuple):
    """The second is not there in every model."""

    gate: Tensor
    bias: Tensor | None


def mix(scale: float, weights: Weights, table: Tensor, x: Tensor, positions: Tensor) -> Mixed:
    """x [T, 48], gate [96, 48], table [50, 48]: an external call between fused loops."""
    product = torch.nn.functional.linear(x * scale, weights.gate, weights.bias)
    left, right = product.chunk(2, dim=-1)
    return Mixed(torch.nn.functional.silu(left) * right + table[positions], positions + 1)


def project(
    x: Tensor,
    plain: Tensor,
    bias: Tensor,
    levels: Matrix,
    nibbles: Matrix,
) -> Tensor:
    """x [T, 64] times three matrices [64, 64]: one as it is, one int8, one int4."""
    x = ops.linear(x, plain, bias)
    x = ops.linear(x * 2, levels)
    return ops.linear(x + 1, nibbles, bias)


class Passed(NamedTuple):
    """Results of three kinds of memory, and one of them again."""

    itself: Tensor
    part: Tensor
    heads: Tensor
    whole: Tensor
    again: Tensor


def pass_on(x: Tensor, weight: Tensor, positions: Tensor) -> Passed:
    """x [T, 64], weight [128, 64], positions [T]: by fused loops and the op alone.

    The first result is an argument, the second a part of it, the third every other head of a
    product, and the others are that product.
    """
    product = ops.linear(x + positions[:, None], weight)
    return Passed(x, x[:, 16:40], product.view(-1, 8, 16)[:, ::2], product, product)


def pass_on_with_torch(x: Tensor, weight: Tensor, positions: Tensor) -> Passed:
    """The same, with a product that torch computes."""
    product = torch.nn.functional.linear(x + positions[:, None], weight)
    return Passed(x, x[:, 16:40], product.view(-1, 8, 16)[:, ::2], product, product)


def pass_constant(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """The same arguments, and a tensor that is part of the code."""
    return ops.linear(x + positions[:, None], weight) + _SHIFTS


_SHIFTS = torch.arange(128) * 0.5


def impossible(x: Tensor) -> Tensor:
    """Asks for the data of a tensor that has none."""
    return x if x.sum().item() > 0 else x + 1


def mixture(
    x: Tensor,
    router: Tensor,
    gate_up: Matrix,
    down: Matrix,
) -> Tensor:
    """x [T, 64] through two of eight experts."""
    weights, ids = ops.route(ops.linear(x.float(), router), ops.Routing(chosen=2))
    return x + ops.experts(x * 2, gate_up, down, weights, ids)


class Gated(NamedTuple):
    """A stream of activations, and its rows by their size."""

    total: Tensor
    scaled: Tensor


def gate_twice(x: Tensor, residual: Tensor, gain: Tensor) -> Gated:
    """x [T, 144], residual [T, 72], gain [72]: loops over numbers, and over tokens with sums."""
    gate, up = x.chunk(2, dim=-1)
    total = (torch.nn.functional.silu(gate) * up).flatten() + residual.flatten()
    total = total.view(residual.shape)
    spread = total.pow(2).mean(-1, keepdim=True)
    return Gated(total, total * torch.rsqrt(spread + 1e-5) * gain)
