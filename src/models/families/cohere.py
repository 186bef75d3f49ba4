"""Command R and Aya 23 (Cohere 2024): attention and MLP beside each other, and layer norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from src.models.config import AttentionConfig, ModelConfig
from src.models.families.family import Family, attention, decoder, mlp
from src.models.fields import Fields
from src.models.layers.norms import NormSpec
from src.models.layers.rope import RopeConfig

DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def cohere_attention(fields: Fields, rope: RopeConfig, **differences: Any) -> AttentionConfig:
    """`attention_bias` is on all four projections."""
    bias = fields.boolean("attention_bias")
    return attention(fields, rope, interleaved=True, qkv_bias=bias, output_bias=bias, **differences)


def cohere(fields: Fields, rope: RopeConfig, attentions: Sequence[AttentionConfig]) -> ModelConfig:
    """A decoder of these layers with parallel MLPs, and a factor of its logits."""
    return decoder(
        fields,
        attentions,
        [mlp(fields)] * len(attentions),
        norm=NormSpec(fields.number("layer_norm_eps"), scales_wide=True, centered=True),
        parallel=True,
        rope=rope,
        logit_multiplier=fields.number("logit_scale"),
    )


class Cohere(Family):
    """All layers attend to the whole context. Large models normalize each query and key head."""

    architectures = ("CohereForCausalLM",)
    model_type = "cohere"
    defaults = DEFAULTS

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Norms of queries and keys have weights of their own for each head."""
        rope = fields.rope(
            fields.integer("max_position_embeddings"), theta=("rope_theta", 500_000.0)
        )
        norm = "each_head" if fields.boolean("use_qk_norm") else None
        one = cohere_attention(fields, rope, qk_norm=norm)
        return cohere(fields, rope, [one] * fields.integer("num_hidden_layers"))
