"""Gemma 3, text (Gemma Team 2025): query/key norms, one RoPE base per kind of layer.

EmbeddingGemma (Vera et al. 2025) is the same with attention both ways.
"""

from __future__ import annotations

from dataclasses import replace

from src.models.config import ModelConfig
from src.models.families.family import Family
from src.models.families.gemma2 import DEFAULTS, gemma
from src.models.fields import Fields


class Gemma3(Family):
    """Query/key norms, one RoPE base per kind of layer, full attention in every sixth layer."""

    architectures = ("Gemma3ForCausalLM",)
    overflows_float16 = True
    model_type = "gemma3_text"
    defaults = DEFAULTS | {"max_position_embeddings": 131072, "sliding_window_pattern": 6}

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Old files have `rope_theta` and `rope_local_base_freq`, new ones parameters by kind.

        Larger models stretch positions 8 times; their files give the stretched 131072 tokens.
        """
        if fields.raw("attn_logit_softcapping") is not None:
            # The reference reads this field but does not apply it.
            raise fields.error("attn_logit_softcapping", "null (no score of Gemma 3 is capped)")
        positions = fields.integer("max_position_embeddings")
        whole = fields.rope(positions, "full_attention", theta=("rope_theta", 1e6))
        whole = replace(whole, states_stretched=True)
        local = fields.rope(positions, "sliding_attention", theta=("rope_local_base_freq", 1e4))
        pattern = fields.integer("sliding_window_pattern")
        both = fields.boolean("use_bidirectional_attention")
        return gemma(fields, pattern, whole, local, looks_ahead=both, qk_norm="head")
