"""LFM2 (Liquid AI, 2025): gated short convolutions, with attention in some of the layers."""

from __future__ import annotations

from collections.abc import Sequence

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

LAYER_TYPES = ("conv", "full_attention")


class Lfm2(Family):
    """Short convolutions beside attention with norms of queries and keys."""

    architectures = ("Lfm2ForCausalLM",)
    model_type = "lfm2"
    defaults = {  # noqa: RUF012
        "max_position_embeddings": 128_000,
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`layer_types`, or `full_attn_idxs`, says which layers attend."""
        mixing = mixing_parts(fields)
        return lfm2_decoder(fields, mixing, [dense_mlp(_size(fields))] * len(mixing))


def dense_mlp(size: int) -> MLPConfig:
    """The MLP of this size; its activation is not in the file."""
    return MLPConfig(
        intermediate_size=size,
        activation="silu",
        gate_up_names=("feed_forward.w1", "feed_forward.w3"),
        down_name="feed_forward.w2",
    )


def mixing_parts(fields: Fields) -> list[MixingConfig]:
    """What mixes the tokens in each layer."""
    layers = fields.integer("num_hidden_layers")
    kinds = fields.strings("layer_types", layers, LAYER_TYPES) or _kinds(fields, layers)
    if "full_attention" not in kinds:
        raise fields.error("layer_types", "at least one layer with full_attention")
    attends = attention(
        fields,
        qk_norm="head",
        output_name="self_attn.out_proj",
        q_norm_name="self_attn.q_layernorm",
        k_norm_name="self_attn.k_layernorm",
    )
    taps = fields.integer("conv_L_cache")
    convolves = ShortConvolutionConfig(taps=taps, bias=fields.boolean("conv_bias"))
    return [convolves if kind == "conv" else attends for kind in kinds]


def lfm2_decoder(
    fields: Fields, mixing: Sequence[MixingConfig], mlps: Sequence[MLPConfig | ExpertsConfig]
) -> ModelConfig:
    """A decoder with the names of LFM2; older files spell `tie_word_embeddings` otherwise."""
    older = fields.raw("tie_embedding") is not None
    return decoder(
        fields,
        mixing,
        mlps,
        norm=NormSpec(fields.number("norm_eps")),
        layer_norms={"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"},
        final_norm_name="model.embedding_norm",
        tie_word_embeddings=fields.boolean("tie_embedding" if older else "tie_word_embeddings"),
    )


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    chosen = fields.raw("full_attn_idxs")
    if chosen is None:
        return ("full_attention",) * layers
    if not isinstance(chosen, list) or any(type(each) is not int for each in chosen):
        raise fields.error("full_attn_idxs", "a list of integers")
    return tuple("full_attention" if layer in chosen else "conv" for layer in range(layers))


def _size(fields: Fields) -> int:
    """The size of the MLP, which older files give before it is adjusted."""
    name = "intermediate_size" if fields.raw("block_ff_dim") is None else "block_ff_dim"
    size = fields.integer(name)
    if not fields.boolean("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if fields.raw("block_ffn_dim_multiplier") is None:
        return size
    size = int(fields.number("block_ffn_dim_multiplier") * size)
    multiple = fields.integer("block_multiple_of")
    return -(-size // multiple) * multiple
