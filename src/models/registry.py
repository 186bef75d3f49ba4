"""From `architectures[0]` of a checkpoint to the class that runs it."""

from __future__ import annotations

from pathlib import Path

from src.core.errors import ModelLoadError
from src.models.config import (
    Fields,
    ModelConfig,
    architecture_of,
    parse_config,
    parse_generation,
    read_json,
)
from src.models.decoder import Decoder
from src.models.llama import Llama
from src.models.mistral import Mistral
from src.models.qwen2 import Qwen2
from src.models.qwen3 import Qwen3

FAMILIES: tuple[type[Decoder], ...] = (Llama, Mistral, Qwen2, Qwen3)
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def supported_architectures() -> tuple[str, ...]:
    """The names that `architectures[0]` may have."""
    return tuple(_BY_ARCHITECTURE)


def family_of(architecture: str) -> type[Decoder]:
    """The class that runs an architecture.

    Raises:
        ModelLoadError: there is none; the message lists those there are.
    """
    try:
        return _BY_ARCHITECTURE[architecture]
    except KeyError:
        raise ModelLoadError(
            f"architecture {architecture} is not supported; supported are "
            + ", ".join(_BY_ARCHITECTURE)
        ) from None


def load_config(path: Path) -> ModelConfig:
    """The configuration of a model directory, without touching its weights.

    Raises:
        ModelLoadError: `config.json` or `generation_config.json` is missing, malformed, or asks for
            something that is not supported.
    """
    source = path / "config.json"
    raw = read_json(source)
    family = family_of(architecture_of(raw, str(source)))
    fields = Fields(raw, str(source), family.defaults)
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    return parse_config(raw, fields, family.variant(fields), parse_generation(raw, generation))
