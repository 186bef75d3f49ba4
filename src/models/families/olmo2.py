"""OLMo 2 (Team OLMo 2024): post-norms only, and query/key norms over all heads together."""

from __future__ import annotations

from collections.abc import Sequence

from src.models.config import AttentionConfig, ModelConfig
from src.models.families.family import Family, attention, decoder, mlp
from src.models.fields import Fields
from src.models.layers.norms import NormSpec
from src.models.layers.rope import RopeConfig

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
# The norms of a layer that normalizes the outputs of its blocks, not their inputs.
POST_NORMS = {
    "attention_norm": None,
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": None,
    "mlp_post_norm": "post_feedforward_layernorm",
}


def olmo_attention(fields: Fields, rope: RopeConfig) -> AttentionConfig:
    """`attention_bias` is on all four projections."""
    bias = fields.boolean("attention_bias")
    return attention(fields, rope, qkv_bias=bias, output_bias=bias, qk_norm="whole")


def olmo(fields: Fields, rope: RopeConfig, attentions: Sequence[AttentionConfig]) -> ModelConfig:
    """A decoder whose layers normalize their outputs, not their inputs."""
    return decoder(
        fields,
        attentions,
        [mlp(fields)] * len(attentions),
        norm=NormSpec(fields.number("rms_norm_eps"), scales_wide=True),
        layer_norms=POST_NORMS,
        rope=rope,
    )


class Olmo2(Family):
    """All layers attend to the whole context."""

    architectures = ("Olmo2ForCausalLM",)
    model_type = "olmo2"
    defaults = DEFAULTS

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """See `olmo`."""
        rope = fields.rope(fields.integer("max_position_embeddings"))
        layers = fields.integer("num_hidden_layers")
        return olmo(fields, rope, [olmo_attention(fields, rope)] * layers)
