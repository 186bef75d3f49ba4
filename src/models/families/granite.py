"""Granite 3 (IBM 2024): Llama with four multipliers."""

from __future__ import annotations

from typing import Any

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, mlp
from src.models.fields import Fields

DEFAULTS = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


def multipliers(fields: Fields) -> dict[str, Any]:
    """The multipliers among the values of `ModelConfig`. Logits are divided by theirs."""
    return {
        "embedding_multiplier": fields.number("embedding_multiplier"),
        "residual_multiplier": fields.number("residual_multiplier"),
        "logit_multiplier": 1 / fields.number("logits_scaling"),
    }


class Granite(Family):
    """The plain dense decoder with multipliers."""

    architectures = ("GraniteForCausalLM",)
    model_type = "granite"
    defaults = DEFAULTS

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`attention_bias` is on all four projections, `mlp_bias` on all three."""
        layers, bias = fields.integer("num_hidden_layers"), fields.boolean("attention_bias")
        one = attention(
            fields,
            scale=fields.number("attention_multiplier"),
            qkv_bias=bias,
            output_bias=bias,
        )
        return decoder(
            fields,
            [one] * layers,
            [mlp(fields, bias=fields.boolean("mlp_bias"))] * layers,
            **multipliers(fields),
        )
