"""Computes the mixers of a program: one file per kind, one object per layer.

A kind's file has what the engine knows of it: the memory that its layers take from the KV cache,
the metadata that it prepares of a step's rows, how it mixes, whether a graph can capture it, which
attention backends serve it, and how the CPU's one-call step computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from src.engine.execution.mixers.attention import PagedAttention
from src.engine.execution.mixers.latent_attention import LatentAttention
from src.engine.execution.mixers.mixer import LayerMixer
from src.engine.execution.mixers.recurrence import Recurrence
from src.engine.execution.mixers.short_convolution import ShortConvolution

__all__ = ["MIXERS", "LayerMixer"]

MIXERS: Mapping[str, type[LayerMixer[Any]]] = {
    "attention": PagedAttention,
    "latent_attention": LatentAttention,
    "recurrence": Recurrence,
    "short_convolution": ShortConvolution,
}
"""Kind of mixer -> its class."""
