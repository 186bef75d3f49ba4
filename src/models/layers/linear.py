"""Projections with weights in any format."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from src import ops
from src.distributed import Group
from src.models.weights.methods import Weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: [T, in] with [out, in] and [out] to [T, out], in x's dtype.

    Every projection goes through this function. A weight in another format than the model's dtype
    is an object that has its own `multiply`. On the CPU the compiled kernel sums a token's result
    in an order that does not depend on the other tokens.
    """
    if not isinstance(weight, Tensor):
        return weight.multiply(x, bias)
    if x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    return ops.linear(x, weight, None, bias)


def row_parallel_linear(x: Tensor, weight: Weight, bias: Tensor | None, group: Group) -> Tensor:
    """A projection with a sharded input dimension; partial sums are reduced over the group.

    The bias is added once, by rank 0, before the sum.
    """
    own = bias if group.rank == 0 else None
    return group.all_reduce(linear(x, weight, own))


def capped(x: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(x / cap)``; without a cap ``x``."""
    return x if cap is None else torch.tanh(x / cap) * cap
