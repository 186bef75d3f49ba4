"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with experts and a shared one."""

from __future__ import annotations

from src.models.config import ExpertsConfig, MLPConfig, ModelConfig
from src.models.families.family import Family, attention, decoder, experts, mlp, windowed
from src.models.fields import LAYER_TYPES, Fields


class Qwen2Moe(Family):
    """Qwen2 with experts and a gated shared expert in most layers, or in all."""

    architectures = ("Qwen2MoeForCausalLM",)
    model_type = "qwen2_moe"
    defaults = {  # noqa: RUF012
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`qkv_bias` is on queries, keys and values."""
        shared = mlp(
            fields,
            intermediate_size=fields.integer("shared_expert_intermediate_size"),
            gate_up_names=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            down_name="mlp.shared_expert.down_proj",
        )
        sparse = experts(
            fields,
            intermediate_size=fields.integer("moe_intermediate_size"),
            renormalize=fields.boolean("norm_topk_prob"),
            shared=shared,
            shared_gate_name="mlp.shared_expert_gate",
        )
        windows = _windows(fields)
        base = attention(fields, qkv_bias=fields.boolean("qkv_bias", True))
        return decoder(fields, windowed(base, windows), sparse_layers(fields, len(windows), sparse))


def sparse_layers(
    fields: Fields, layers: int, sparse: ExpertsConfig
) -> list[MLPConfig | ExpertsConfig]:
    """Experts in each layer but dense ones.

    Layers in `mlp_only_layers` are dense, and so are layers whose number, counted from 1, is not a
    multiple of `decoder_sparse_step`.
    """
    dense, step = fields.integers("mlp_only_layers"), fields.integer("decoder_sparse_step")
    return [
        mlp(fields) if layer in dense or (layer + 1) % step else sparse for layer in range(layers)
    ]


def _windows(fields: Fields) -> tuple[int | None, ...]:
    """The window of each layer.

    By default every second layer below `max_window_layers`, from the first on, has a window if
    `use_sliding_window` says so.
    """
    layers, switched = fields.integer("num_hidden_layers"), fields.boolean("use_sliding_window")
    kinds = fields.strings("layer_types", layers, LAYER_TYPES)
    if kinds is None:
        first_layers = fields.integer("max_window_layers") if switched else 0
        kinds = tuple(
            "full_attention" if layer % 2 or layer >= first_layers else "sliding_attention"
            for layer in range(layers)
        )
    elif "sliding_attention" in kinds and not switched:
        raise fields.error("use_sliding_window", "true if layer_types has sliding_attention")
    window = fields.integer("sliding_window") if "sliding_attention" in kinds else None
    return fields.windows(kinds, window)
