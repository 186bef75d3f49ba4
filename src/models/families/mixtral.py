"""Mixtral (Jiang et al. 2024): Mistral with experts in every layer."""

from __future__ import annotations

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, experts
from src.models.fields import Fields


class Mixtral(Family):
    """The plain decoder with experts, and a sliding window on every layer or on none."""

    architectures = ("MixtralForCausalLM",)
    model_type = "mixtral"
    defaults = {  # noqa: RUF012
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Weights of the chosen experts always sum up to 1."""
        layers = fields.integer("num_hidden_layers")
        rope = fields.rope(fields.integer("max_position_embeddings"), theta=("rope_theta", 1e6))
        mlp = experts(
            fields,
            intermediate_size=fields.integer("intermediate_size"),
            renormalize=True,
            router_name="block_sparse_moe.gate",
            names=tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
        )
        window = fields.optional_integer("sliding_window")
        attentions = [attention(fields, rope, window=window)] * layers
        return decoder(fields, attentions, [mlp] * layers, rope=rope)
