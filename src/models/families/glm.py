"""GLM-4 of June 2024 (Team GLM 2024): neighbours of a part of each head are rotated."""

from __future__ import annotations

from collections.abc import Mapping

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, mlp
from src.models.fields import Fields

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
}


def glm(fields: Fields, layer_norms: Mapping[str, str | None] | None = None) -> ModelConfig:
    """GLM-4 with these norms in its layers. `attention_bias` is on queries, keys and values."""
    layers = fields.integer("num_hidden_layers")
    rope = fields.rope(fields.integer("max_position_embeddings"), partial=True)
    one = attention(fields, rope, interleaved=True, qkv_bias=fields.boolean("attention_bias", True))
    return decoder(
        fields,
        [one] * layers,
        [mlp(fields, gate_up_names=("mlp.gate_up_proj",))] * layers,
        layer_norms=layer_norms,
        rope=rope,
    )


class Glm(Family):
    """Interleaved rotation of a part of each head, and a fused gate and up projection."""

    architectures = ("GlmForCausalLM",)
    model_type = "glm"
    defaults = DEFAULTS

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """See `glm`."""
        return glm(fields)
