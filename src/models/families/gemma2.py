"""Gemma 2 (Gemma Team 2024): sliding windows and full attention, soft caps, pre- and post-norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from src.models.config import AttentionConfig, ModelConfig
from src.models.families.family import Family, attention, decoder, kinds_of_layers, mlp
from src.models.fields import Fields
from src.models.layers.norms import NormSpec
from src.models.layers.rope import RopeConfig
from src.ops.attention.spec import ALL_AHEAD

_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def gemma(
    fields: Fields,
    pattern: int,
    global_rope: RopeConfig,
    local_rope: RopeConfig,
    *,
    looks_ahead: bool = False,
    **own: Any,
) -> ModelConfig:
    """Gemma 2 or 3, text.

    Parameters
    ----------
    fields
        Of `config.json`.
    pattern
        Every ``pattern``-th layer has full attention, unless there is `layer_types`.
    global_rope
        Of layers with full attention.
    local_rope
        Of layers with a window.
    looks_ahead
        Whether tokens see later ones; then the file's window is for both sides together.
    own
        Values of `AttentionConfig` that differ between Gemma 2 and 3.
    """
    layers, bias = fields.integer("num_hidden_layers"), fields.boolean("attention_bias")
    kinds = kinds_of_layers(fields, layers, pattern)
    whole = attention(
        fields,
        global_rope,
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        **own,
    )
    local = replace(whole, rope=local_rope, window=fields.optional_integer("sliding_window"))
    if looks_ahead:
        whole, local = _both_ways(fields, whole, local)
    attentions: list[AttentionConfig] = [
        local if kind == "sliding_attention" else whole for kind in kinds
    ]
    return decoder(
        fields,
        attentions,
        [mlp(fields, activation=fields.activation("hidden_activation", "hidden_act"))] * layers,
        norm=NormSpec(fields.number("rms_norm_eps"), offset=1.0, scales_wide=True),
        layer_norms=_NORMS,
        rope=global_rope,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        logit_cap=fields.optional_number("final_logit_softcapping"),
    )


def _both_ways(
    fields: Fields, whole: AttentionConfig, local: AttentionConfig
) -> tuple[AttentionConfig, AttentionConfig]:
    """Layers with full attention, and those with a window, where tokens see later ones."""
    whole = replace(whole, ahead=ALL_AHEAD)
    if local.window is None:
        return whole, replace(local, ahead=ALL_AHEAD)
    if local.window < 2:
        raise fields.error("sliding_window", "at least 2, half of it on each side")
    side = local.window // 2
    return whole, replace(local, window=side + 1, ahead=side)


DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


class Gemma2(Family):
    """Soft caps on scores and logits; every second layer has full attention."""

    architectures = ("Gemma2ForCausalLM",)
    overflows_float16 = True
    model_type = "gemma2"
    defaults = DEFAULTS | {
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """One RoPE for all layers."""
        if fields.boolean("use_bidirectional_attention"):
            raise fields.error("use_bidirectional_attention", "false for Gemma 2")
        rope = fields.rope(fields.integer("max_position_embeddings"))
        cap = fields.optional_number("attn_logit_softcapping")
        return gemma(fields, 2, rope, rope, cap=cap)
