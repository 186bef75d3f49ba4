"""Model architectures in plain torch, and their checkpoints.

`resolve_model` turns a directory or hub id into a directory, `load_config` reads what it is,
`load_model` builds and fills a `Decoder`. No model library is imported.
"""

from src.models.config import GenerationDefaults, ModelConfig
from src.models.decoder import Attend, Decoder, DecoderSpec, LayerKVSpec
from src.models.hub import resolve_model
from src.models.loader import load_model, outline_model
from src.models.regions import (
    EAGER_REGIONS,
    AttentionInputs,
    PostAttention,
    PreAttention,
    Regions,
    RegionSpec,
)
from src.models.registry import load_config, supported_architectures

__all__ = [
    "EAGER_REGIONS",
    "Attend",
    "AttentionInputs",
    "Decoder",
    "DecoderSpec",
    "GenerationDefaults",
    "LayerKVSpec",
    "ModelConfig",
    "PostAttention",
    "PreAttention",
    "RegionSpec",
    "Regions",
    "load_config",
    "load_model",
    "outline_model",
    "resolve_model",
    "supported_architectures",
]
