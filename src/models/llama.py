"""Llama 2, 3, 3.1, 3.2 (Touvron et al. 2023; Grattafiori et al. 2024)."""

from __future__ import annotations

from src.models.config import Fields, Variant
from src.models.decoder import Decoder


class Llama(Decoder):
    """The plain dense decoder, with optional biases."""

    architectures = ("LlamaForCausalLM",)

    @classmethod
    def variant(cls, fields: Fields) -> Variant:
        """`attention_bias` is on all four projections, `mlp_bias` on all three."""
        attention_bias = fields.boolean("attention_bias")
        return Variant(
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=fields.boolean("mlp_bias"),
            sliding_windows=(None,) * fields.integer("num_hidden_layers"),
        )
