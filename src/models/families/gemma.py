"""Gemma (Gemma Team 2024): Llama with gated GELUs, a scaled embedding and norms around 1."""

from __future__ import annotations

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, mlp
from src.models.fields import Fields
from src.models.layers.norms import NormSpec

DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


class Gemma(Family):
    """Full attention in every layer, and two norms a layer."""

    architectures = ("GemmaForCausalLM",)
    model_type = "gemma"
    defaults = DEFAULTS

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`gelu` of the published files means its approximation by tanh, as in transformers."""
        if fields.boolean("use_bidirectional_attention"):
            raise fields.error("use_bidirectional_attention", "false for Gemma")
        activation = fields.activation("hidden_act")
        if activation == "gelu":
            activation = "gelu_tanh"
        layers, bias = fields.integer("num_hidden_layers"), fields.boolean("attention_bias")
        return decoder(
            fields,
            [attention(fields, qkv_bias=bias, output_bias=bias)] * layers,
            [mlp(fields, activation=activation)] * layers,
            norm=NormSpec(fields.number("rms_norm_eps"), offset=1.0, scales_wide=True),
            embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        )
