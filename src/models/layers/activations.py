"""Activations of gated MLPs."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional

from src.ops.elementwise import by_token

Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu"]
# Names in `config.json`.
SPELLINGS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation, elementwise."""
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def sigmoid(x: Tensor, deterministic: bool) -> Tensor:
    """The sigmoid of x [T, N]; see `gated` for ``deterministic``."""
    return by_token(torch.sigmoid, x) if deterministic else x.sigmoid()


def gated(gate_up: Tensor, activation: Activation, deterministic: bool = False) -> Tensor:
    """`activation(gate) * up` of a fused projection: [T, 2 I] (gate first) to [T, I].

    With `deterministic` a token's result does not depend on the other tokens.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if not deterministic:
        return activate(gate, activation) * up
    return by_token(lambda x: activate(x, activation), gate) * up
