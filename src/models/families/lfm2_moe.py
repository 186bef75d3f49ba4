"""LFM2-MoE (Liquid AI, 2025): LFM2 with experts behind its first layers."""

from __future__ import annotations

from src.models.config import ExpertsConfig, MLPConfig, ModelConfig
from src.models.families.family import Family, experts
from src.models.families.lfm2 import (
    DEFAULTS,
    LAYER_TYPES,
    dense_mlp,
    lfm2_decoder,
    mixing_parts,
)
from src.models.fields import Fields


class Lfm2Moe(Family):
    """Short convolutions beside attention; experts chosen by sigmoids and a bias."""

    architectures = ("Lfm2MoeForCausalLM",)
    model_type = "lfm2_moe"
    defaults = {  # noqa: RUF012
        **DEFAULTS,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """The first `num_dense_layers` have an MLP."""
        layers, dense = fields.integer("num_hidden_layers"), fields.count("num_dense_layers")
        kinds = fields.strings("layer_types", layers, LAYER_TYPES)
        if kinds is None:
            raise fields.error("layer_types", f"a list of {layers} entries")
        parts = mixing_parts(fields, kinds)
        mlps: list[MLPConfig | ExpertsConfig] = [
            dense_mlp(fields.integer("intermediate_size")) if layer < dense else _experts(fields)
            for layer in range(layers)
        ]
        return lfm2_decoder(fields, parts, mlps)


def _experts(fields: Fields) -> ExpertsConfig:
    has_bias = fields.boolean("use_expert_bias")
    return experts(
        fields,
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.boolean("norm_topk_prob"),
        added_to_sum=1e-6,
        scoring="sigmoid",
        scale=fields.number("routed_scaling_factor"),
        router_name="feed_forward.gate",
        choice_bias_name="feed_forward.expert_bias" if has_bias else None,
        names=tuple(f"feed_forward.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
    )
