"""Maps the `architectures` of a checkpoint to the family that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from src.core.errors import ModelLoadError
from src.models.config import ModelConfig
from src.models.families.family import Family
from src.models.families.gemma2 import Gemma2
from src.models.families.gemma3 import Gemma3
from src.models.families.granite_hybrid import GraniteHybrid
from src.models.families.llama import Llama
from src.models.families.mistral import Mistral
from src.models.families.mixtral import Mixtral
from src.models.families.olmo2 import Olmo2
from src.models.families.phi3 import Phi3
from src.models.families.qwen2 import Qwen2
from src.models.families.qwen3 import Qwen3
from src.models.families.qwen3_moe import Qwen3Moe
from src.models.families.qwen3_next import Qwen3Next
from src.models.fields import Fields, read_json
from src.models.generation import parse_generation

FAMILIES: tuple[type[Family], ...] = (
    Gemma2,
    Gemma3,
    GraniteHybrid,
    Llama,
    Mistral,
    Mixtral,
    Olmo2,
    Phi3,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Qwen3Next,
)
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
_BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}


def supported_architectures() -> tuple[str, ...]:
    """The names that `architectures[0]` may have."""
    return tuple(_BY_ARCHITECTURE)


def has_family(raw: Mapping[str, Any]) -> bool:
    """Whether a native family answers to a `config.json`, as `architecture_of` reads it."""
    names = raw.get("architectures")
    if names is None or names == []:
        name, known = raw.get("model_type"), {*_BY_MODEL_TYPE}
    else:
        name, known = names[0] if isinstance(names, list) else None, {*_BY_ARCHITECTURE}
    return isinstance(name, str) and name in known


def family_of(architecture: str) -> type[Family]:
    """The family that runs an architecture.

    Raises:
        ModelLoadError: there is none; the message lists the supported architectures.
    """
    try:
        return _BY_ARCHITECTURE[architecture]
    except KeyError:
        raise ModelLoadError(
            f"architecture {architecture} is not supported; supported are "
            + ", ".join(_BY_ARCHITECTURE)
        ) from None


def architecture_of(raw: Mapping[str, Any], source: str) -> str:
    """`architectures[0]`, after refusing checkpoints that no family can run.

    Some converters and trainers write no `architectures`. Then `model_type` decides, as it always
    does in transformers' AutoModelForCausalLM.

    A checkpoint may bring code for a supported architecture; that code is never run.

    Raises:
        ModelLoadError: remote code, a quantized checkpoint, or no architecture.
    """
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise ModelLoadError(
            f"{source}: quantization_config ({method}) is not supported; "
            "use the unquantized checkpoint"
        )
    names = raw.get("architectures")
    if names is None or names == []:
        return _architecture_of_type(raw.get("model_type"), source)
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ModelLoadError(f"{source}: architectures must name a class, got {names!r}")
    if raw.get("auto_map") and names[0] not in _BY_ARCHITECTURE:
        raise ModelLoadError(
            f"{source}: auto_map asks for code from the checkpoint, since {names[0]} is not "
            "supported; remote code is refused"
        )
    return names[0]


def _architecture_of_type(model_type: object, source: str) -> str:
    family = _BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelLoadError(
            f"{source}: architectures must name a class, or model_type one of "
            f"{', '.join(_BY_MODEL_TYPE)}; model_type is {model_type!r}"
        )
    return family.architectures[0]


def load_config(path: Path) -> ModelConfig:
    """The configuration of a model directory, without touching its weights.

    Raises:
        ModelLoadError: `config.json` or `generation_config.json` is missing, malformed, or asks for
            something that is not supported.
    """
    source = path / "config.json"
    raw = read_json(source)
    architecture = architecture_of(raw, str(source))
    family = family_of(architecture)
    raw = {**raw, "architectures": [architecture]}
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    config = family.describe(Fields(raw, str(source), family.defaults))
    return replace(config, generation=parse_generation(raw, generation))
