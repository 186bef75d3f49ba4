"""Maps the `architectures` of a checkpoint to the family that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from src.core.errors import ModelLoadError
from src.models.config import ModelConfig
from src.models.families.family import Family, Wrapper
from src.models.families.gemma2 import Gemma2
from src.models.families.gemma3 import Gemma3
from src.models.families.gpt_oss import GptOss
from src.models.families.llama import Llama
from src.models.families.llama4 import Llama4
from src.models.families.mistral import Mistral
from src.models.families.mixtral import Mixtral
from src.models.families.olmo2 import Olmo2
from src.models.families.phi3 import Phi3
from src.models.families.qwen2 import Qwen2
from src.models.families.qwen3 import Qwen3
from src.models.families.qwen3_moe import Qwen3Moe
from src.models.fields import Fields, read_json
from src.models.generation import parse_generation

FAMILIES: tuple[type[Family], ...] = (
    Gemma2,
    Gemma3,
    GptOss,
    Llama,
    Llama4,
    Mistral,
    Mixtral,
    Olmo2,
    Phi3,
    Qwen2,
    Qwen3,
    Qwen3Moe,
)
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
_BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
_WRAPPERS = [(wrapper, family) for family in FAMILIES for wrapper in family.wrappers]


def supported_architectures() -> tuple[str, ...]:
    """The names that `architectures[0]` may have."""
    return tuple(_BY_ARCHITECTURE)


def has_family(raw: Mapping[str, Any]) -> bool:
    """Whether a native family answers to a `config.json`, as `load_config` reads it."""
    if _wrapper_of(raw) is not None:
        return True
    names = raw.get("architectures")
    if names is None or names == []:
        name, known = raw.get("model_type"), {*_BY_MODEL_TYPE}
    else:
        name, known = names[0] if isinstance(names, list) else None, {*_BY_ARCHITECTURE}
    return isinstance(name, str) and name in known


def _wrapper_of(raw: Mapping[str, Any]) -> tuple[Wrapper, type[Family]] | None:
    """The wrapper that a `config.json` names, and its family."""
    names = raw.get("architectures")
    for wrapper, family in _WRAPPERS:
        if names == [wrapper.architecture] or (
            names in (None, []) and raw.get("model_type") == wrapper.model_type
        ):
            return wrapper, family
    return None


def _text_of(raw: Mapping[str, Any], family: type[Family], source: str) -> dict[str, Any]:
    """The part of a wrapper's `config.json` that is about text."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ModelLoadError(f"{source}: text_config must be an object, got {text!r}")
    dtype = (
        {}
        if text.get("dtype") or text.get("torch_dtype")
        else {name: raw[name] for name in ("dtype", "torch_dtype") if name in raw}
    )
    whole = {name: raw[name] for name in ("quantization_config",) if name in raw}
    return {**text, **dtype, **whole, "architectures": [family.architectures[0]]}


def _prefixed(config: ModelConfig, wrapper: Wrapper) -> ModelConfig:
    """The same with the names that tensors have in a wrapper's checkpoint."""
    names = ("embedding_name", "layer_name", "final_norm_name", "head_name")
    changes: dict[str, Any] = {name: wrapper.prefix + getattr(config, name) for name in names}
    return replace(config, **changes, unread=wrapper.others)


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
    name = _named_architecture(raw, source)
    if quantization := raw.get("quantization_config"):
        is_object = isinstance(quantization, dict)
        method = quantization.get("quant_method", quantization) if is_object else quantization
        if not is_object or method not in family_of(name).packings:
            raise ModelLoadError(
                f"{source}: quantization_config ({method}) is not supported; "
                "use the unquantized checkpoint"
            )
    return name


def _named_architecture(raw: Mapping[str, Any], source: str) -> str:
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
    wrapped = _wrapper_of(raw)
    if wrapped is not None:
        raw = _text_of(raw, wrapped[1], str(source))
    architecture = architecture_of(raw, str(source))
    family = family_of(architecture)
    raw = {**raw, "architectures": [architecture]}
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    config = family.describe(Fields(raw, str(source), family.defaults))
    if wrapped is not None:
        config = _prefixed(config, wrapped[0])
    return replace(config, generation=parse_generation(raw, generation))
