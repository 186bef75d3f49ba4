"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases on query, key and value."""

from __future__ import annotations

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, mlp, windowed
from src.models.fields import LAYER_TYPES, Fields


class Qwen2(Family):
    """The plain decoder with query/key/value biases and, optionally, windows by layer."""

    architectures = ("Qwen2ForCausalLM",)
    model_type = "qwen2"
    defaults = {  # noqa: RUF012
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Windows follow `use_sliding_window`, `max_window_layers` and `layer_types`."""
        windows = qwen_windows(fields)
        return decoder(
            fields,
            windowed(attention(fields, qkv_bias=True), windows),
            [mlp(fields)] * len(windows),
        )


def qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """The window of each layer.

    Without `use_sliding_window` no layer has one. Otherwise `layer_types` decides, if it is given;
    if not, the layers from `max_window_layers` on have a window.
    """
    layers = fields.integer("num_hidden_layers")
    has_window = fields.boolean("use_sliding_window") and fields.raw("sliding_window") is not None
    window = fields.integer("sliding_window") if has_window else None
    kinds = fields.strings("layer_types", layers, LAYER_TYPES)
    if kinds is not None:
        return fields.windows(kinds, window)
    first = fields.raw("max_window_layers")
    if window is None:
        return (None,) * layers
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.error("max_window_layers", "an integer")
    return tuple(window if layer >= first else None for layer in range(layers))
