"""OLMo 2 (Team OLMo 2024): post-norms only, and query/key norms over all heads together."""

from __future__ import annotations

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, mlp
from src.models.fields import Fields
from src.models.layers.norms import NormSpec


class Olmo2(Family):
    """A decoder whose layers normalize their outputs, not their inputs."""

    architectures = ("Olmo2ForCausalLM",)
    model_type = "olmo2"
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}  # noqa: RUF012

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`attention_bias` is on all four projections."""
        layers, bias = fields.integer("num_hidden_layers"), fields.boolean("attention_bias")
        return decoder(
            fields,
            [attention(fields, qkv_bias=bias, output_bias=bias, qk_norm="whole")] * layers,
            [mlp(fields)] * layers,
            norm=NormSpec(fields.number("rms_norm_eps"), scales_wide=True),
            layer_norms={
                "attention_norm": None,
                "attention_post_norm": "post_attention_layernorm",
                "mlp_norm": None,
                "mlp_post_norm": "post_feedforward_layernorm",
            },
        )
