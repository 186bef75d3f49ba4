"""EXAONE 4 (LG AI Research 2025): norms behind blocks, and windows beside full attention."""

from __future__ import annotations

from dataclasses import replace

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, kinds_of_layers, mlp
from src.models.families.olmo2 import POST_NORMS
from src.models.fields import Fields


class Exaone4(Family):
    """Layers with a window rotate. The others do so only where the model has no window at all."""

    architectures = ("Exaone4ForCausalLM",)
    model_type = "exaone4"
    defaults = {  # noqa: RUF012
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`sliding_window: null` is full attention in every layer, with positions."""
        layers, window = (
            fields.integer("num_hidden_layers"),
            fields.optional_integer("sliding_window"),
        )
        rope = fields.rope(fields.integer("max_position_embeddings", default=2048))
        local = attention(fields, rope, window=window, qk_norm="head")
        whole = local if window is None else replace(local, rope=None, window=None)
        attentions = [
            local if kind == "sliding_attention" else whole
            for kind in _kinds(fields, layers, window)
        ]
        return decoder(
            fields, attentions, [mlp(fields)] * layers, layer_norms=POST_NORMS, rope=rope
        )


def _kinds(fields: Fields, layers: int, window: int | None) -> tuple[str, ...]:
    """`sliding_window_pattern` counts only without `layer_types`; beside them it may be text."""
    is_said = window is None or fields.raw("layer_types") is not None
    kinds = kinds_of_layers(
        fields, layers, 1 if is_said else fields.integer("sliding_window_pattern")
    )
    if window is None and "sliding_attention" in kinds:
        raise fields.error("sliding_window", "a positive integer for layers of sliding_attention")
    return kinds
