"""Writes the parts of layers into a program: one file per kind, beside `layers/<kind>.py`.

A kind's file declares the parameters of the part, and adds its segments and its mixer.
"""

from __future__ import annotations

from collections.abc import Mapping

from src.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    MLPConfig,
    RecurrenceConfig,
    ShortConvolutionConfig,
)
from src.models.parts.attention import write_attention
from src.models.parts.experts import write_experts
from src.models.parts.latent_attention import write_latent_attention
from src.models.parts.layer import RESIDUAL, LayerWriter, PartWriter
from src.models.parts.mlp import write_mlp
from src.models.parts.recurrence import write_recurrence
from src.models.parts.short_convolution import write_short_convolution

__all__ = ["RESIDUAL", "WRITERS", "LayerWriter"]

WRITERS: Mapping[type, PartWriter] = {
    AttentionConfig: write_attention,
    LatentAttentionConfig: write_latent_attention,
    RecurrenceConfig: write_recurrence,
    ShortConvolutionConfig: write_short_convolution,
    MLPConfig: write_mlp,
    ExpertsConfig: write_experts,
}
"""Class of a part's description -> what writes it."""
