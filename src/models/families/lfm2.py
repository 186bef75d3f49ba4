"""LFM2 (Liquid AI, 2025): gated short convolutions, with attention in some of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from src.models.config import (
    ExpertsConfig,
    MixingConfig,
    MLPConfig,
    ModelConfig,
    ShortConvolutionConfig,
)
from src.models.families.family import Family, attention, decoder
from src.models.fields import Fields
from src.models.layers.norms import NormSpec

LAYER_TYPES: Final = ("conv", "full_attention")
# What both families' configurations have where their files say nothing.
DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
}
# Sizes of tensors must stay far below 2**63 bytes.
_MOST_WIDE: Final = 2**24


class Lfm2(Family):
    """Short convolutions beside attention with norms of queries and keys."""

    architectures = ("Lfm2ForCausalLM",)
    model_type = "lfm2"
    defaults = {  # noqa: RUF012
        **DEFAULTS,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`layer_types`, or `full_attn_idxs`, says which layers have attention."""
        layers = fields.integer("num_hidden_layers")
        kinds = fields.strings("layer_types", layers, LAYER_TYPES)
        if kinds is None and fields.raw("full_attn_idxs") is not None:
            attending = fields.integers("full_attn_idxs")
            kinds = tuple(LAYER_TYPES[layer in attending] for layer in range(layers))
            if not any(layer in attending for layer in range(layers)):
                raise fields.error("full_attn_idxs", "a list with one of the layers at least")
        kinds = kinds or ("full_attention",) * layers
        parts = mixing_parts(fields, kinds)
        return lfm2_decoder(fields, parts, [dense_mlp(_width(fields))] * layers)


def dense_mlp(width: int) -> MLPConfig:
    """The MLP of this width."""
    return MLPConfig(
        intermediate_size=width,
        activation="silu",
        gate_up_names=("feed_forward.w1", "feed_forward.w3"),
        down_name="feed_forward.w2",
    )


def mixing_parts(fields: Fields, kinds: Sequence[str]) -> list[MixingConfig]:
    """What mixes the tokens in layers of these kinds."""
    if "full_attention" not in kinds:
        raise fields.error("layer_types", "a list with full_attention for one layer at least")
    if fields.activation("hidden_act") != "silu":
        raise fields.error("hidden_act", "silu, the only activation that these models have")
    attends = attention(
        fields,
        qk_norm="head",
        output_name="self_attn.out_proj",
        q_norm_name="self_attn.q_layernorm",
        k_norm_name="self_attn.k_layernorm",
    )
    taps = fields.integer("conv_L_cache")
    if taps < 2 and "conv" in kinds:
        raise fields.error("conv_L_cache", "at least 2: with 1 there is nothing to keep")
    convolves = ShortConvolutionConfig(taps=taps, bias=fields.boolean("conv_bias"))
    return [convolves if kind == "conv" else attends for kind in kinds]


def lfm2_decoder(
    fields: Fields, parts: Sequence[MixingConfig], mlps: Sequence[MLPConfig | ExpertsConfig]
) -> ModelConfig:
    """A decoder of these layers, with the names of LFM2."""
    # Older files have another name, which counts if both are there.
    tie = "tie_word_embeddings" if fields.raw("tie_embedding") is None else "tie_embedding"
    return decoder(
        fields,
        parts,
        mlps,
        norm=NormSpec(fields.number("norm_eps")),
        layer_norms={"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"},
        final_norm_name="model.embedding_norm",
        tie_word_embeddings=fields.boolean(tie),
    )


def _width(fields: Fields) -> int:
    """The width of the MLP. Files may give another one, of which this follows."""
    name = "intermediate_size" if fields.raw("block_ff_dim") is None else "block_ff_dim"
    width = fields.integer(name)
    if fields.boolean("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if fields.raw("block_ffn_dim_multiplier") is not None:
            width = int(fields.number("block_ffn_dim_multiplier") * width)
            multiple = fields.integer("block_multiple_of")
            width = -(-width // multiple) * multiple
    if not 1 <= width <= _MOST_WIDE:
        raise fields.error(name, f"one of which a width from 1 to {_MOST_WIDE} follows")
    return width
