"""Projections of a model of transformers, by the kernels that native families use on the CPU."""

from __future__ import annotations

from torch import Tensor, nn

from src import ops


class PooledLinear(nn.Linear):
    """A projection by `ops.linear`.

    The engine leaves torch one thread on the CPU: others are the kernels' own, which read a matrix
    once for all tokens.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., in] to [..., out]."""
        if input.numel() == 0 or input.dtype != self.weight.dtype:
            return super().forward(input)
        out = ops.linear(input.reshape(-1, input.shape[-1]), self.weight, self.bias)
        return out.view(*input.shape[:-1], -1)


def use_pool(module: nn.Module) -> None:
    """Have all plain projections of a model computed so."""
    for one in module.modules():
        if type(one) is nn.Linear:
            one.__class__ = PooledLinear
