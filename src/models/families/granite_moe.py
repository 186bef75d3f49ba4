"""Granite 3 with experts (IBM 2024): a softmax over the chosen ones, from fused tensors."""

from __future__ import annotations

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, experts
from src.models.families.granite import DEFAULTS, multipliers
from src.models.fields import Fields


class GraniteMoe(Family):
    """Granite with experts in every layer."""

    architectures = ("GraniteMoeForCausalLM",)
    model_type = "granitemoe"
    defaults = DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2}

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`attention_bias` is on all four projections."""
        layers, bias = fields.integer("num_hidden_layers"), fields.boolean("attention_bias")
        one = attention(
            fields,
            scale=fields.number("attention_multiplier"),
            qkv_bias=bias,
            output_bias=bias,
        )
        sparse = experts(
            fields,
            intermediate_size=fields.integer("intermediate_size"),
            renormalize=False,
            scoring="softmax_of_chosen",
            router_name="block_sparse_moe.router.layer",
            names=("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
        )
        return decoder(fields, [one] * layers, [sparse] * layers, **multipliers(fields))
