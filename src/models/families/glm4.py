"""GLM-4-0414 and GLM-Z1 (Team GLM 2025): GLM-4 with norms before and behind attention and MLP."""

from __future__ import annotations

from src.models.config import ModelConfig
from src.models.families.family import Family
from src.models.families.glm import DEFAULTS, glm
from src.models.fields import Fields

_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


class Glm4(Family):
    """GLM-4 with four norms a layer."""

    architectures = ("Glm4ForCausalLM",)
    overflows_float16 = True
    model_type = "glm4"
    defaults = DEFAULTS

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """See `glm`."""
        return glm(fields, _NORMS)
