"""What a GGUF file changes in the configuration of its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from src.core.gguf import open_gguf
from src.models.config import AttentionConfig, LayerConfig, ModelConfig
from src.models.gguf.architectures import architecture_of
from src.models.gguf.checkpoint import block_types
from src.models.gguf.formats import GGUFFormats


def as_stored(config: ModelConfig, path: Path) -> ModelConfig:
    """The same with the order of rows and the formats that the file has.

    Raises
    ------
    ModelLoadError
        The file is damaged, or its architecture is not served.
    """
    architecture = architecture_of(open_gguf(path).metadata, str(path))[1]
    layers = config.layers
    if architecture.permuted:
        layers = tuple(map(_by_pairs, layers))
    kinds, shifted = block_types(path), architecture.shifted_norms
    formats = None
    if kinds or shifted:
        formats = GGUFFormats(kinds, f"{config.embedding_name}.weight", shifted)
    return replace(config, layers=layers, in_pairs=architecture.permuted, formats=formats)


def _by_pairs(layer: LayerConfig) -> LayerConfig:
    assert isinstance(layer.attention, AttentionConfig)
    return replace(layer, attention=replace(layer.attention, interleaved=True))
