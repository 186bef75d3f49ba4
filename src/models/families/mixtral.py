"""Mixtral (Jiang et al. 2024): Mistral with experts in every layer."""

from __future__ import annotations

from src.models.config import ExpertsConfig, ModelConfig
from src.models.families.family import Family, attention, decoder
from src.models.fields import Fields


class Mixtral(Family):
    """The plain decoder with experts, and a sliding window on every layer or on none."""

    architectures = ("MixtralForCausalLM",)
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
        experts = ExpertsConfig(
            num_experts=fields.integer("num_local_experts"),
            num_chosen=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            renormalize=True,
            activation=fields.activation("hidden_act"),
            router_name="block_sparse_moe.gate",
            names=tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
        )
        window = fields.optional_integer("sliding_window")
        return decoder(fields, [attention(fields, window=window)] * layers, [experts] * layers)
