"""The dense gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from src.distributed import Group
from src.models.layers.activations import Activation, gated
from src.models.layers.attention import add
from src.models.layers.linear import linear, partial_linear
from src.models.layers.norms import NormSpec, rms_norm
from src.models.weights.parameters import Weight


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """The static part of `mlp`; ``norm`` is of the input, ``post_norm`` of the output."""

    norm: NormSpec | None
    post_norm: NormSpec | None
    activation: Activation
    multiplier: float
    group: Group
    deterministic: bool


class MLPWeights(NamedTuple):
    """Weights of `mlp`, in the model's dtype unless quantized."""

    norm: Tensor | None  # [H]
    gate_up_weight: Weight  # [2 I, H], rows: gate, up
    gate_up_bias: Tensor | None  # [2 I]
    down_weight: Weight  # [H, I]
    down_bias: Tensor | None  # [H]
    post_norm: Tensor | None  # [H]


def mlp(spec: MLPSpec, weights: MLPWeights, residual: Tensor) -> Tensor:
    """Add the MLP's output to the residual stream [T, H]."""
    normed = residual
    if spec.norm is not None and weights.norm is not None:
        normed = rms_norm(residual, weights.norm, spec.norm)
    added = spec.group.all_reduce(partial_mlp(spec, weights, normed))
    return add(residual, added, weights.post_norm, spec.post_norm, spec.multiplier)


def partial_mlp(spec: MLPSpec, weights: MLPWeights, x: Tensor) -> Tensor:
    """This rank's part of the MLP's output without its norms, [T, H] to [T, H]."""
    gate_up = linear(x, weights.gate_up_weight, weights.gate_up_bias)
    inner = gated(gate_up, spec.activation, spec.deterministic)
    return partial_linear(inner, weights.down_weight, weights.down_bias, spec.group)
