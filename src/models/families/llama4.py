"""Llama 4, text (Meta 2025): chunked attention, layers without RoPE, experts with a shared one."""

from __future__ import annotations

from dataclasses import replace

from src.models.config import AttentionConfig, ExpertsConfig, MLPConfig, ModelConfig, StackedExperts
from src.models.families.family import Family, Wrapper, attention, decoder, experts, mlp
from src.models.fields import Fields
from src.models.layers.attention import Temperature

_KINDS = ("full_attention", "chunked_attention")


class Llama4(Family):
    """Layers with RoPE attend within chunks; others attend to all, and have no positions."""

    architectures = ("Llama4ForCausalLM",)
    model_type = "llama4_text"
    wrappers = (
        Wrapper(
            "Llama4ForConditionalGeneration",
            "llama4",
            "language_model.",
            ("vision_model.", "multi_modal_projector."),
        ),
    )
    defaults = {  # noqa: RUF012
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`moe_layers` or `interleave_moe_layer_step` says which layers have experts."""
        layers = fields.integer("num_hidden_layers")
        rope = fields.rope(
            fields.integer("max_position_embeddings"), theta=("rope_theta", 500000.0)
        )
        bias = fields.boolean("attention_bias")
        rotated = attention(fields, rope, interleaved=True, qkv_bias=bias, output_bias=bias)
        rotated = replace(rotated, rotated_norm=fields.boolean("use_qk_norm"))
        temperature = None
        if fields.boolean("attn_temperature_tuning"):
            temperature = Temperature(fields.integer("floor_scale"), fields.number("attn_scale"))
        plain = replace(rotated, rope=None, rotated_norm=False, temperature=temperature)
        rotates = _rotating_layers(fields, layers)
        bases = [rotated if is_rotated else plain for is_rotated in rotates]
        sparse = _expert_layers(fields, layers)
        return decoder(
            fields,
            _chunked(fields, bases, rotates),
            [_experts(fields) if layer in sparse else _mlp(fields) for layer in range(layers)],
            rope=rope,
        )


def _rotating_layers(fields: Fields, layers: int) -> list[bool]:
    """`no_rope_layers` has a 1 for each layer with RoPE."""
    given = fields.integers("no_rope_layers")
    if not given:
        interval = fields.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(given) < layers:
        raise fields.error("no_rope_layers", f"a list of at least {layers} numbers")
    return [bool(each) for each in given[:layers]]


def _chunked(
    fields: Fields, bases: list[AttentionConfig], rotates: list[bool]
) -> list[AttentionConfig]:
    """`layer_types` says which layers attend within chunks; by default those with RoPE do."""
    chunk = fields.optional_integer("attention_chunk_size")
    kinds = fields.strings("layer_types", len(bases), _KINDS)
    if kinds is None:
        kinds = tuple(_KINDS[is_rotated and chunk is not None] for is_rotated in rotates)
    if chunk is None and "chunked_attention" in kinds:
        raise fields.error("attention_chunk_size", "a positive integer for chunked_attention")
    return [
        replace(base, chunk=chunk if kind == "chunked_attention" else None)
        for base, kind in zip(bases, kinds, strict=True)
    ]


def _expert_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    if fields.raw("moe_layers") is not None:
        return fields.integers("moe_layers")
    step = fields.integer("interleave_moe_layer_step")
    return tuple(range(step - 1, layers, step))


def _mlp(fields: Fields) -> MLPConfig:
    return mlp(
        fields,
        intermediate_size=fields.integer("intermediate_size_mlp"),
        gate_up_names=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down_name="feed_forward.down_proj",
    )


def _experts(fields: Fields) -> ExpertsConfig:
    inner, shared = fields.integer("intermediate_size"), "feed_forward.shared_expert"
    return experts(
        fields,
        intermediate_size=inner,
        renormalize=False,
        scoring="sigmoid",
        weighs_inputs=True,
        router_name="feed_forward.router",
        names=StackedExperts(
            gate_up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj"
        ),
        shared=mlp(
            fields,
            intermediate_size=inner,
            gate_up_names=(f"{shared}.gate_proj", f"{shared}.up_proj"),
            down_name=f"{shared}.down_proj",
        ),
    )
