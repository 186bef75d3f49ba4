"""Llama 2, 3, 3.1, 3.2 (Touvron et al. 2023; Grattafiori et al. 2024)."""

from __future__ import annotations

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, mlp
from src.models.fields import Fields


class Llama(Family):
    """The plain dense decoder, with optional biases."""

    architectures = ("LlamaForCausalLM",)
    model_type = "llama"

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`attention_bias` is on all four projections, `mlp_bias` on all three."""
        layers, bias = fields.integer("num_hidden_layers"), fields.boolean("attention_bias")
        return decoder(
            fields,
            [attention(fields, qkv_bias=bias, output_bias=bias)] * layers,
            [mlp(fields, bias=fields.boolean("mlp_bias"))] * layers,
        )
