"""Granite 4 hybrid (IBM 2025): Mamba-2 layers, and some with attention."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

from src.models.config import (
    ExpertsConfig,
    MixingConfig,
    MLPConfig,
    ModelConfig,
    RecurrenceConfig,
)
from src.models.families.family import Family, attention, decoder, experts, mlp
from src.models.fields import Fields

# Kind of layer -> whether it is Mamba-2; older files use the second pair.
_IS_MAMBA = {
    "linear_attention": True,
    "full_attention": False,
    "mamba": True,
    "attention": False,
}


class GraniteHybrid(Family):
    """One MLP in every layer, beside experts where there are any."""

    architectures = ("GraniteMoeHybridForCausalLM",)
    model_type = "granitemoehybrid"
    defaults = {  # noqa: RUF012
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Attention is rotated if `position_embedding_type` is `rope`, and otherwise not at all."""
        layers = fields.integer("num_hidden_layers")
        name = "layers_block_type" if fields.raw("layer_types") is None else "layer_types"
        kinds = fields.strings(name, layers, tuple(_IS_MAMBA))
        if kinds is None or all(_IS_MAMBA[kind] for kind in kinds):
            raise fields.error("layer_types", "a list in which at least one layer has attention")
        rope = fields.rope(fields.integer("max_position_embeddings"))
        positions = fields.raw("position_embedding_type")
        if positions not in (None, "nope", "rope"):
            raise fields.error("position_embedding_type", "rope, nope or null")
        bias = fields.boolean("attention_bias")
        attends = attention(
            fields,
            rope,
            scale=fields.number("attention_multiplier"),
            qkv_bias=bias,
            output_bias=bias,
        )
        if positions != "rope":
            attends = replace(attends, rope=None)
        has_mamba = any(_IS_MAMBA[kind] for kind in kinds)
        mamba = cls._mamba(fields) if has_mamba else None
        parts: list[MixingConfig] = [
            mamba if mamba is not None and _IS_MAMBA[kind] else attends for kind in kinds
        ]
        return decoder(
            fields,
            parts,
            [cls._mlp(fields)] * layers,
            rope=rope,
            embedding_multiplier=fields.number("embedding_multiplier"),
            residual_multiplier=fields.number("residual_multiplier"),
            logit_multiplier=1.0 / fields.number("logits_scaling"),
        )

    @classmethod
    def _mlp(cls, fields: Fields) -> MLPConfig | ExpertsConfig:
        dense = mlp(
            fields,
            intermediate_size=fields.integer("shared_intermediate_size"),
            gate_up_names=("shared_mlp.input_linear",),
            down_name="shared_mlp.output_linear",
        )
        if fields.raw("num_local_experts") in (None, 0):
            return dense
        return experts(
            fields,
            "num_local_experts",
            intermediate_size=fields.integer("intermediate_size"),
            renormalize=True,
            router_name="block_sparse_moe.router.layer",
            names=("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
            shared=dense,
        )

    @classmethod
    def _mamba(cls, fields: Fields) -> RecurrenceConfig:
        if fields.activation("hidden_act") != "silu":
            raise fields.error("hidden_act", "silu, which is built into the convolution")
        heads, groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups")
        values = fields.integer("mamba_expand") * fields.integer("hidden_size")
        if fields.raw("mamba_d_head") == "auto":
            dim = values // heads
        else:
            dim = fields.integer("mamba_d_head")
        if heads * dim != values:
            raise fields.error("mamba_n_heads", f"{values} (expanded) / mamba_d_head={dim}")
        if heads % groups:
            raise fields.error("mamba_n_groups", f"a divisor of mamba_n_heads={heads}")
        return RecurrenceConfig(
            kind="mamba",
            key_heads=groups,
            heads=heads,
            key_dim=fields.integer("mamba_d_state"),
            dim=dim,
            taps=fields.integer("mamba_d_conv"),
            name="mamba",
            bias=fields.boolean("mamba_proj_bias"),
            convolution_bias=fields.boolean("mamba_conv_bias"),
            step_limits=_step_limits(fields),
        )


def _step_limits(fields: Fields) -> tuple[float, float]:
    limits = fields.raw("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if isinstance(limits, list):
        # transformers spells numbers that JSON does not have this way.
        limits = [math.inf if each == {"__float__": "Infinity"} else each for each in limits]
        if len(limits) == 2 and all(type(each) in (int, float) for each in limits):
            (shortest, longest), most = limits, sys.float_info.max
            # An integer may be larger than any float.
            if 0 <= shortest <= min(longest, most) and (longest <= most or longest == math.inf):
                return float(shortest), float(longest)
    raise fields.error("time_step_limit", "two numbers, the smaller one first")
