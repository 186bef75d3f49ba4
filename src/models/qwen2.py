"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases on query, key and value."""

from __future__ import annotations

from src.models.config import Fields, Variant
from src.models.decoder import Decoder


class Qwen2(Decoder):
    """The plain decoder with query/key/value biases and, optionally, windows by layer."""

    architectures = ("Qwen2ForCausalLM",)
    defaults = {  # noqa: RUF012
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    @classmethod
    def variant(cls, fields: Fields) -> Variant:
        """Windows follow `use_sliding_window`, `max_window_layers` and `layer_types`."""
        layers = fields.integer("num_hidden_layers")
        return Variant(qkv_bias=True, sliding_windows=fields.layer_windows(layers))
