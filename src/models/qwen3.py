"""Qwen3, dense (Yang et al. 2025): queries and keys are normalized per head before rotation."""

from __future__ import annotations

from src.models.config import Fields, Variant
from src.models.decoder import Decoder


class Qwen3(Decoder):
    """The plain decoder with query/key norms, a head_dim of its own, and optional windows."""

    architectures = ("Qwen3ForCausalLM",)
    defaults = {  # noqa: RUF012
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    @classmethod
    def variant(cls, fields: Fields) -> Variant:
        """`attention_bias` is on all four projections; windows are as in Qwen2."""
        layers = fields.integer("num_hidden_layers")
        attention_bias = fields.boolean("attention_bias")
        return Variant(
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm=True,
            sliding_windows=fields.layer_windows(layers),
        )
