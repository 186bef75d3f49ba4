"""A mixture of gated MLPs; a router chooses a few of them for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from src import ops
from src.distributed import Group
from src.models.layers.activations import Activation
from src.models.layers.attention import add
from src.models.layers.linear import linear
from src.models.layers.norms import NormSpec, rms_norm
from src.ops.routing import Routing, route


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The static part of `experts`; ``norm`` is of the input, ``post_norm`` of the output."""

    norm: NormSpec | None
    post_norm: NormSpec | None
    routing: Routing
    activation: Activation
    multiplier: float
    group: Group
    deterministic: bool


class ExpertsWeights(NamedTuple):
    """Weights of `experts`, in the model's dtype except the router."""

    norm: Tensor | None  # [H]
    router: Tensor  # float32 [E, H]: bfloat16 could not distinguish experts of close scores
    gate_up: Tensor  # [E, 2 I, H], of each expert: gate, up
    down: Tensor  # [E, H, I]
    post_norm: Tensor | None  # [H]


def experts(spec: ExpertsSpec, weights: ExpertsWeights, residual: Tensor) -> Tensor:
    """Add the output of the chosen experts to the residual stream [T, H]."""
    normed = residual
    if spec.norm is not None and weights.norm is not None:
        normed = rms_norm(residual, weights.norm, spec.norm)
    logits = linear(normed.to(torch.float32), weights.router)
    chosen, ids = route(logits, spec.routing)
    added = spec.group.all_reduce(
        ops.experts(
            *(normed, weights.gate_up, weights.down, chosen, ids),
            activation=spec.activation,
            deterministic=spec.deterministic,
        )
    )
    return add(residual, added, weights.post_norm, spec.post_norm, spec.multiplier)
