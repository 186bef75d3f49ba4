"""SmolLM3 (Hugging Face 2025): Llama in which some layers do not rotate."""

from __future__ import annotations

from dataclasses import replace

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, mlp
from src.models.fields import LAYER_TYPES, Fields


class SmolLM3(Family):
    """The plain decoder; every fourth layer has no positions and, optionally, a window."""

    architectures = ("SmolLM3ForCausalLM",)
    model_type = "smollm3"
    defaults = {  # noqa: RUF012
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`attention_bias` is on all four projections, `mlp_bias` on all three."""
        layers, bias = fields.integer("num_hidden_layers"), fields.boolean("attention_bias")
        rope = fields.rope(fields.integer("max_position_embeddings"), theta=("rope_theta", 2e6))
        rotates = _rotating_layers(fields, layers)
        base = attention(fields, rope, qkv_bias=bias, output_bias=bias)
        attentions = [
            replace(base, rope=rope if is_rotated else None, window=window)
            for is_rotated, window in zip(rotates, _windows(fields, rotates), strict=True)
        ]
        mlps = [mlp(fields, bias=fields.boolean("mlp_bias"))] * layers
        return decoder(fields, attentions, mlps, rope=rope)


def _rotating_layers(fields: Fields, layers: int) -> list[bool]:
    """`no_rope_layers` has a 1 for each layer that is rotated."""
    if fields.raw("no_rope_layers") is None:
        interval = fields.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    given = fields.integers("no_rope_layers")
    if len(given) < layers or not set(given) <= {0, 1}:
        raise fields.error("no_rope_layers", f"a list of a 0 or a 1 for each of {layers} layers")
    return [bool(each) for each in given[:layers]]


def _windows(fields: Fields, rotates: list[bool]) -> tuple[int | None, ...]:
    """By default layers without rotation have a window, if `use_sliding_window` says so."""
    switched, window = (
        fields.boolean("use_sliding_window"),
        fields.optional_integer("sliding_window"),
    )
    kinds = fields.strings("layer_types", len(rotates), LAYER_TYPES)
    if kinds is None:
        has_window = switched and window is not None
        kinds = tuple(
            "sliding_attention" if has_window and not is_rotated else "full_attention"
            for is_rotated in rotates
        )
    if "sliding_attention" in kinds and (not switched or window is None):
        raise fields.error("layer_types", "full_attention without use_sliding_window and a window")
    return fields.windows(kinds, window)
