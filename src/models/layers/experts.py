"""A mixture of gated MLPs, of which each token goes through a few."""

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
    """The static part of `experts`; ``norm`` is of what goes in, ``post_norm`` of what is added."""

    norm: NormSpec | None
    post_norm: NormSpec | None
    routing: Routing
    activation: Activation
    multiplier: float
    group: Group
    deterministic: bool


class ExpertsWeights(NamedTuple):
    """In the model's dtype, but for the router."""

    norm: Tensor | None  # [H]
    router: Tensor  # float32 [E, H]: in bfloat16 near experts could not be told apart
    gate_up: Tensor  # [E, 2 I, H], of each expert: gate, up
    down: Tensor  # [E, H, I]
    post_norm: Tensor | None  # [H]


def experts(spec: ExpertsSpec, weights: ExpertsWeights, residual: Tensor) -> Tensor:
    """The residual stream [T, H] with what the chosen experts leave."""
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
