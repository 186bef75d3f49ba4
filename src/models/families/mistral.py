"""Mistral (Jiang et al. 2023): a sliding window on every layer, or on none."""

from __future__ import annotations

from src.models.config import ModelConfig
from src.models.families.family import Family, attention, decoder, mlp
from src.models.fields import Fields


class Mistral(Family):
    """The plain decoder with a window of `sliding_window` tokens; `null` is full attention."""

    architectures = ("MistralForCausalLM",)
    model_type = "mistral"
    defaults = {  # noqa: RUF012
        "sliding_window": 4096,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """All layers have the same window; files with windows by layer are refused."""
        kinds = fields.raw("layer_types")
        if kinds is not None and (not isinstance(kinds, list) or kinds != kinds[:1] * len(kinds)):
            raise fields.error("layer_types", "the same for every layer of a Mistral model")
        layers, window = (
            fields.integer("num_hidden_layers"),
            fields.optional_integer("sliding_window"),
        )
        return decoder(fields, [attention(fields, window=window)] * layers, [mlp(fields)] * layers)
