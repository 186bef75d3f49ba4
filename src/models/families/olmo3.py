"""OLMo 3 (Team OLMo 2025): OLMo 2 with windows beside full attention."""

from __future__ import annotations

from dataclasses import replace

from src.models.config import ModelConfig
from src.models.families.family import Family, kinds_of_layers
from src.models.families.olmo2 import DEFAULTS, olmo, olmo_attention
from src.models.fields import Fields


class Olmo3(Family):
    """Every fourth layer attends to all, and may stretch its RoPE; the others have a window."""

    architectures = ("Olmo3ForCausalLM",)
    model_type = "olmo3"
    defaults = DEFAULTS | {"sliding_window": 4096}

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`rope_theta` and `rope_scaling` are of layers with full attention alone."""
        layers = fields.integer("num_hidden_layers")
        positions = fields.integer("max_position_embeddings")
        rope = fields.rope(positions, "full_attention", theta=("rope_theta", 500_000.0))
        local_rope = fields.rope(positions, "sliding_attention", theta=(None, 500_000.0))
        whole = olmo_attention(fields, rope)
        local = replace(whole, rope=local_rope, window=fields.integer("sliding_window"))
        kinds = kinds_of_layers(fields, layers, 4)
        attentions = [local if kind == "sliding_attention" else whole for kind in kinds]
        return olmo(fields, rope, attentions)
