"""Writes a mixture of experts, with an MLP beside them that all tokens share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from src.models.builder import Name
from src.models.config import ExpertsConfig
from src.models.layers.experts import ExpertsSpec, ExpertsWeights, experts
from src.models.parts.expert_placements import place_experts
from src.models.parts.layer import RESIDUAL, LayerWriter
from src.models.parts.mlp import mlp_norm, mlp_norm_spec, mlp_spec, mlp_weights
from src.models.weights.parameters import Placement
from src.ops.projections.routing import Routing


def write_experts(
    layer: LayerWriter, config: ExpertsConfig, between: Callable[[], None] = lambda: None
) -> None:
    """Write experts; see `PartWriter`."""
    builder, shared, post_norm = layer.builder, config.shared, layer.config.mlp_post_norm
    count, hidden = config.num_experts, layer.hidden
    inner = builder.group.shard(config.intermediate_size)
    placed = place_experts(config, layer.stored, inner)
    builder.segment(
        experts,
        ExpertsSpec(
            norm=mlp_norm_spec(layer),
            post_norm=layer.norm_spec(post_norm),
            routing=Routing(
                chosen=config.num_chosen,
                scoring=config.scoring,
                renormalize=config.renormalize,
                added=config.added_to_sum,
                scale=config.scale,
                groups=config.groups,
                chosen_groups=config.chosen_groups,
                ranked_by=config.groups_ranked_by,
            ),
            activation=config.activation,
            weighs_inputs=config.weighs_inputs,
            multiplier=layer.model.residual_multiplier,
            group=builder.group,
            deterministic=builder.deterministic,
            shared=None if shared is None else mlp_spec(layer, shared),
        ),
        ExpertsWeights(
            norm=mlp_norm(layer),
            router=_router(layer, "router", count, config.router_name),
            gate_up=builder.parameter(
                layer.own + "experts.gate_up", (count, 2 * inner, hidden), "experts", placed.gate_up
            ),
            down=builder.parameter(
                layer.own + "experts.down", (count, hidden, inner), "experts", placed.down
            ),
            post_norm=layer.block_norm("mlp_post_norm", post_norm),
            choice_bias=_choice_bias(layer, config),
            shared=None if shared is None else mlp_weights(layer, shared, "shared."),
            shared_gate=_router(layer, "shared.gate", 1, config.shared_gate_name),
            router_bias=_router_bias(layer, config),
            gate_up_bias=_expert_biases(layer, "gate_up", (count, 2 * inner), placed.gate_up_bias),
            down_bias=_expert_biases(layer, "down", (count, hidden), placed.down_bias),
        ),
        (RESIDUAL,),
        (layer.residual,),
    )
    between()


def _router(layer: LayerWriter, name: str, count: int, tensor: str | None) -> Name:
    if tensor is None:
        return None
    placement = Placement(f"{layer.stored}{tensor}.weight")
    shape = (count, layer.hidden)
    return layer.builder.parameter(
        layer.own + name, shape, "router", (placement,), dtype=torch.float32
    )


def _router_bias(layer: LayerWriter, config: ExpertsConfig) -> Name:
    if not config.router_bias:
        return None
    return layer.builder.parameter(
        layer.own + "router_bias",
        (config.num_experts,),
        "router",
        (Placement(f"{layer.stored}{config.router_name}.bias"),),
        fill=0.0,
        dtype=torch.float32,
    )


def _expert_biases(
    layer: LayerWriter, name: str, shape: tuple[int, int], placements: Sequence[Placement]
) -> Name:
    if not placements:
        return None
    name = f"{layer.own}experts.{name}_bias"
    return layer.builder.parameter(name, shape, "vector", placements, fill=0.0)


def _choice_bias(layer: LayerWriter, config: ExpertsConfig) -> Name:
    if config.choice_bias_name is None:
        return None
    return layer.builder.parameter(
        layer.own + "choice_bias",
        (config.num_experts,),
        "router",
        (Placement(layer.stored + config.choice_bias_name),),
        fill=0.0,
        dtype=torch.float32,
    )
