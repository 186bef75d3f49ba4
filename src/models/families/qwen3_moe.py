"""Qwen3 with experts (Yang et al. 2025)."""

from __future__ import annotations

from src.models.config import ModelConfig
from src.models.families.family import Family, decoder, experts
from src.models.families.qwen2_moe import sparse_layers
from src.models.families.qwen3 import qwen3_attention
from src.models.fields import Fields


class Qwen3Moe(Family):
    """Qwen3 with experts in most layers, or in all."""

    architectures = ("Qwen3MoeForCausalLM",)
    model_type = "qwen3_moe"
    defaults = {  # noqa: RUF012
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Either all layers have a window or none has."""
        layers = fields.integer("num_hidden_layers")
        window = None
        if fields.boolean("use_sliding_window"):
            window = fields.optional_integer("sliding_window")
        sparse = experts(
            fields,
            intermediate_size=fields.integer("moe_intermediate_size"),
            renormalize=fields.boolean("norm_topk_prob"),
        )
        attentions = qwen3_attention(fields, [window] * layers)
        return decoder(fields, attentions, sparse_layers(fields, layers, sparse))
