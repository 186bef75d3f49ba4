"""Qwen3, dense (Yang et al. 2025): queries and keys are normalized per head."""

from __future__ import annotations

from collections.abc import Sequence

from src.models.config import AttentionConfig, ModelConfig
from src.models.families.family import Family, attention, decoder, mlp, windowed
from src.models.families.qwen2 import qwen_windows
from src.models.fields import Fields


def qwen3_attention(fields: Fields, windows: Sequence[int | None]) -> list[AttentionConfig]:
    """`attention_bias` is on all four projections."""
    bias = fields.boolean("attention_bias")
    base = attention(fields, qkv_bias=bias, output_bias=bias, qk_norm="head")
    return windowed(base, windows)


class Qwen3(Family):
    """The plain decoder with query/key norms, a head_dim of its own, and optional windows."""

    architectures = ("Qwen3ForCausalLM",)
    model_type = "qwen3"
    defaults = {  # noqa: RUF012
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Windows are as in Qwen2."""
        windows = qwen_windows(fields)
        return decoder(fields, qwen3_attention(fields, windows), [mlp(fields)] * len(windows))
