"""Command R7B, Command A and Aya Expanse 2 (Cohere 2025): Cohere with windows by layer."""

from __future__ import annotations

from dataclasses import replace

from src.models.config import ModelConfig
from src.models.families.cohere import DEFAULTS, cohere, cohere_attention
from src.models.families.family import Family, kinds_of_layers
from src.models.fields import Fields


class Cohere2(Family):
    """Layers with a window rotate; each fourth layer attends to all and knows no positions."""

    architectures = ("Cohere2ForCausalLM",)
    model_type = "cohere2"
    defaults = DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4}

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`head_dim` always follows from `hidden_size`."""
        layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
        rope = fields.rope(fields.integer("max_position_embeddings"))
        head_dim = fields.integer("hidden_size") // heads
        if fields.optional_integer("head_dim") not in (None, head_dim):
            # The reference overrides it.
            raise fields.error("head_dim", f"hidden_size / num_attention_heads = {head_dim}")
        local = cohere_attention(fields, rope, window=fields.integer("sliding_window"))
        whole = replace(local, rope=None, window=None)
        kinds = kinds_of_layers(fields, layers, fields.integer("sliding_window_pattern"))
        attentions = [local if kind == "sliding_attention" else whole for kind in kinds]
        return cohere(fields, rope, attentions)
