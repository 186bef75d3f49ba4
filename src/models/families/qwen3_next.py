"""Qwen3-Next (Qwen team 2025): the gated delta rule, and gated attention in every fourth layer."""

from __future__ import annotations

from src.models.config import (
    ExpertsConfig,
    LayerConfig,
    MixingConfig,
    MLPConfig,
    ModelConfig,
    PredictorConfig,
    RecurrenceConfig,
)
from src.models.families.family import Family, attention, decoder, experts, mlp
from src.models.fields import Fields
from src.models.layers.norms import NormSpec

_KINDS = ("linear_attention", "full_attention")


class Qwen3Next(Family):
    """Experts with a gated shared one in most layers, and perhaps a layer for further tokens."""

    architectures = ("Qwen3NextForCausalLM",)
    model_type = "qwen3_next"
    defaults = {  # noqa: RUF012
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Without `layer_types` every `full_attention_interval`-th layer has attention.

        No field says whether there is a layer that predicts further tokens.
        """
        layers, every = (
            fields.integer("num_hidden_layers"),
            fields.integer("full_attention_interval"),
        )
        kinds = fields.strings("layer_types", layers, _KINDS) or [
            _KINDS[(layer + 1) % every == 0] for layer in range(layers)
        ]
        if "full_attention" not in kinds:
            raise fields.error("layer_types", "a list in which at least one layer has attention")
        rope = fields.rope(fields.integer("max_position_embeddings"), partial=True)
        bias = fields.boolean("attention_bias")
        attends = attention(
            fields, rope, qk_norm="head", has_gate=True, qkv_bias=bias, output_bias=bias
        )
        linear = _delta(fields)
        parts: list[MixingConfig] = [
            linear if kind == "linear_attention" else attends for kind in kinds
        ]
        norm = NormSpec(fields.number("rms_norm_eps", default=1e-6), offset=1.0, scales_wide=True)
        mlps = _mlps(fields, layers)
        predictor = PredictorConfig(
            layer=LayerConfig(attention=attends, mlp=_mlps(fields, 1)[0]),
            layer_name="mtp.layers.0",
            join_name="mtp.fc",
            embedding_norm_name="mtp.pre_fc_norm_embedding",
            hidden_norm_name="mtp.pre_fc_norm_hidden",
            final_norm_name="mtp.norm",
            prefix="mtp.",
        )
        return decoder(
            fields, parts, mlps, norm=norm, rope=rope, unread=("mtp.",), predictor=predictor
        )


def _delta(fields: Fields) -> RecurrenceConfig:
    if fields.activation("hidden_act") != "silu":
        raise fields.error("hidden_act", "silu, which is built into the convolution")
    key_heads = fields.integer("linear_num_key_heads")
    heads = fields.integer("linear_num_value_heads")
    if heads % key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of {key_heads} key heads")
    return RecurrenceConfig(
        kind="delta",
        key_heads=key_heads,
        heads=heads,
        key_dim=fields.integer("linear_key_head_dim"),
        dim=fields.integer("linear_value_head_dim"),
        taps=fields.integer("linear_conv_kernel_dim"),
        name="linear_attn",
    )


def _mlps(fields: Fields, layers: int) -> list[MLPConfig | ExpertsConfig]:
    dense, step = fields.integers("mlp_only_layers"), fields.integer("decoder_sparse_step")
    if fields.raw("num_experts") == 0:
        return [mlp(fields)] * layers
    shared = mlp(
        fields,
        intermediate_size=fields.integer("shared_expert_intermediate_size"),
        gate_up_names=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        down_name="mlp.shared_expert.down_proj",
    )
    sparse = experts(
        fields,
        *("num_experts", "num_local_experts"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.boolean("norm_topk_prob"),
        shared=shared,
        shared_gate_name="mlp.shared_expert_gate",
    )
    return [
        mlp(fields) if layer in dense or (layer + 1) % step else sparse for layer in range(layers)
    ]
