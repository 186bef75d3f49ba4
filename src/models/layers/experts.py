"""A mixture of gated MLPs; a router chooses a few of them for each token.

Beside them one more MLP may compute every token (Qwen2-MoE: a shared expert with a gate of its own;
DeepSeek: shared experts, which are one MLP of their joint width).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from src import ops
from src.distributed import Group
from src.models.layers.activations import Activation, sigmoid
from src.models.layers.attention import add
from src.models.layers.linear import linear
from src.models.layers.mlp import MLPSpec, MLPWeights, partial_mlp
from src.models.layers.norms import NormSpec, rms_norm
from src.ops.matrix import Operand, as_matrix
from src.ops.projections.experts import ClampedSwiglu
from src.ops.projections.routing import Routing, route


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The static part of `experts`; ``norm`` is of the input, ``post_norm`` of the output.

    ``shared`` is of the MLP that computes every token, which has no norms.
    """

    norm: NormSpec | None
    post_norm: NormSpec | None
    routing: Routing
    activation: Activation | ClampedSwiglu
    weighs_inputs: bool
    multiplier: float
    group: Group
    deterministic: bool
    shared: MLPSpec | None = None


class ExpertsWeights(NamedTuple):
    """Weights of `experts`, in the model's dtype except those that weigh experts."""

    norm: Tensor | None  # [H]
    router: Tensor  # float32 [E, H]: bfloat16 could not distinguish experts of close scores
    gate_up: Operand  # [E, 2 I, H], of each expert: gate, up
    down: Operand  # [E, H, I]
    post_norm: Tensor | None  # [H]
    choice_bias: Tensor | None = None  # float32 [E], see `ops.projections.routing.route`
    shared: MLPWeights | None = None
    shared_gate: Tensor | None = None  # float32 [1, H]; the shared output's factor is its sigmoid
    router_bias: Tensor | None = None  # float32 [E]
    gate_up_bias: Tensor | None = None  # [E, 2 I]
    down_bias: Tensor | None = None  # [E, H]


def experts(spec: ExpertsSpec, weights: ExpertsWeights, residual: Tensor) -> Tensor:
    """Add the output of the chosen experts to the residual stream [T, H]."""
    normed = residual
    if spec.norm is not None and weights.norm is not None:
        normed = rms_norm(residual, weights.norm, spec.norm)
    wide = normed.to(torch.float32)
    logits = linear(wide, weights.router, weights.router_bias)
    chosen, ids = route(logits, spec.routing, weights.choice_bias, spec.deterministic)
    added = ops.experts(
        normed,
        as_matrix(weights.gate_up),
        as_matrix(weights.down),
        chosen,
        ids,
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
        activation=spec.activation,
        weighs_inputs=spec.weighs_inputs,
        deterministic=spec.deterministic,
    )
    if spec.shared is not None and weights.shared is not None:
        shared = partial_mlp(spec.shared, weights.shared, normed)
        if weights.shared_gate is not None:
            factor = sigmoid(linear(wide, weights.shared_gate), spec.deterministic)
            shared = factor.to(shared.dtype) * shared
        added = added + shared
    added = spec.group.all_reduce(added)
    return add(residual, added, weights.post_norm, spec.post_norm, spec.multiplier)
