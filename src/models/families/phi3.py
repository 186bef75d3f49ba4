"""Phi-3 (Abdin et al. 2024): fused projections, and partial rotation of each head."""

from __future__ import annotations

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, mlp
from src.models.fields import Fields


class Phi3(Family):
    """The plain decoder from fused tensors, with `sliding_window` on every layer or on none."""

    architectures = ("Phi3ForCausalLM",)
    model_type = "phi3"
    defaults = {  # noqa: RUF012
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """The first part of each head is rotated: the fraction `partial_rotary_factor`."""
        rope = fields.rope(fields.integer("max_position_embeddings"), partial=True)
        if rope.rope_type not in ("default", "longrope"):
            # Early files use `yarn` for a variant that was later named `longrope`.
            raise fields.error("rope_scaling", "of type default or longrope")
        layers, window = (
            fields.integer("num_hidden_layers"),
            fields.optional_integer("sliding_window"),
        )
        one = attention(fields, rope, window=window, qkv_names=("self_attn.qkv_proj",))
        return decoder(
            fields,
            [one] * layers,
            [mlp(fields, gate_up_names=("mlp.gate_up_proj",))] * layers,
            rope=rope,
        )
