"""Activations of gated MLPs."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional

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

# at::internal::GRAIN_SIZE: up to this size torch computes elementwise operations in one thread.
_UNCUT_ELEMENTS = 32768


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation, elementwise."""
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated(gate_up: Tensor, activation: Activation, deterministic: bool = False) -> Tensor:
    """`activation(gate) * up` of a fused projection: [T, 2 I] (gate first) to [T, I].

    With `deterministic` a token's result does not depend on the other tokens.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if not deterministic or torch.compiler.is_compiling():
        return activate(gate, activation) * up
    # Torch cuts a large tensor for its threads, perhaps in the middle of a row. Elements left over
    # at a cut are not computed in vectors but by a different exp. So the tensors here are too
    # small to be cut.
    rows = max(1, _UNCUT_ELEMENTS // gate.shape[1])
    return torch.cat([activate(part, activation) for part in gate.split(rows)]) * up
