"""LFM2-MoE (Liquid AI, 2025): LFM2 with experts behind its first layers."""

from __future__ import annotations

from src.models.config import ExpertsConfig, MLPConfig, ModelConfig
from src.models.families.family import Family, experts
from src.models.families.lfm2 import dense_mlp, lfm2_decoder, mixing_parts
from src.models.fields import Fields


class Lfm2Moe(Family):
    """Short convolutions beside attention; experts chosen by sigmoids and a bias.

    The reference adds 1e-6 to the sum by which it divides the weights of the chosen experts. Here
    they sum up to 1.
    """

    architectures = ("Lfm2MoeForCausalLM",)
    model_type = "lfm2_moe"
    defaults = {  # noqa: RUF012
        "max_position_embeddings": 128_000,
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "num_dense_layers": 2,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """The first `num_dense_layers` have an MLP."""
        mixing, dense = mixing_parts(fields), fields.count("num_dense_layers")
        mlps: list[MLPConfig | ExpertsConfig] = [
            dense_mlp(fields.integer("intermediate_size")) if layer < dense else _experts(fields)
            for layer in range(len(mixing))
        ]
        return lfm2_decoder(fields, mixing, mlps)


def _experts(fields: Fields) -> ExpertsConfig:
    has_bias = fields.boolean("use_expert_bias")
    return experts(
        fields,
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.boolean("norm_topk_prob"),
        scoring="sigmoid",
        scale=fields.number("routed_scaling_factor"),
        router_name="feed_forward.gate",
        choice_bias_name="feed_forward.expert_bias" if has_bias else None,
        names=tuple(f"feed_forward.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
    )
