"""Projections with weights in any format."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from src import ops
from src.distributed import Group
from src.models.weights.parameters import Weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: [T, in] with [out, in] and [out] to [T, out], in x's dtype.

    Every projection goes through this function. A tensor is a plain matrix in rows; any other has
    its own `multiply`. On the CPU the compiled kernel sums a token's result
    in an order that does not depend on the other tokens.
    """
    if not isinstance(weight, Tensor):
        return weight.multiply(x, bias)
    if x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    return ops.linear(x, weight, bias)


def row_parallel_linear(x: Tensor, weight: Weight, bias: Tensor | None, group: Group) -> Tensor:
    """A projection with a sharded input dimension; partial sums are reduced over the group."""
    return group.all_reduce(partial_linear(x, weight, bias, group))


def partial_linear(x: Tensor, weight: Weight, bias: Tensor | None, group: Group) -> Tensor:
    """This rank's part of the sum in `row_parallel_linear`. Only rank 0 adds the bias."""
    return linear(x, weight, bias if group.rank == 0 else None)


def capped(x: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(x / cap)``; without a cap ``x``."""
    return x if cap is None else torch.tanh(x / cap) * cap
