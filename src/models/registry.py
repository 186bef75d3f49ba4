"""Maps the `architectures` of a checkpoint to the family that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from src.core.errors import ModelLoadError
from src.core.gguf import is_gguf
from src.models.checkpoint import first_dtype
from src.models.config import ModelConfig
from src.models.config_file import name_of_config, names_of_fields, read_config_file
from src.models.families.bert import Bert
from src.models.families.cohere import Cohere
from src.models.families.cohere2 import Cohere2
from src.models.families.deepseek_v2 import DeepseekV2
from src.models.families.deepseek_v3 import DeepseekV3
from src.models.families.distilbert import DistilBert
from src.models.families.exaone4 import Exaone4
from src.models.families.family import Family, Wrapper
from src.models.families.gemma import Gemma
from src.models.families.gemma2 import Gemma2
from src.models.families.gemma3 import Gemma3
from src.models.families.glm import Glm
from src.models.families.glm4 import Glm4
from src.models.families.glm4_moe import Glm4Moe
from src.models.families.gpt_oss import GptOss
from src.models.families.granite import Granite
from src.models.families.granite_hybrid import GraniteHybrid
from src.models.families.granite_moe import GraniteMoe
from src.models.families.lfm2 import Lfm2
from src.models.families.lfm2_moe import Lfm2Moe
from src.models.families.llama import Llama
from src.models.families.llama4 import Llama4
from src.models.families.mistral import Mistral
from src.models.families.mixtral import Mixtral
from src.models.families.modernbert import ModernBert
from src.models.families.olmo2 import Olmo2
from src.models.families.olmo3 import Olmo3
from src.models.families.phi3 import Phi3
from src.models.families.qwen2 import Qwen2
from src.models.families.qwen2_moe import Qwen2Moe
from src.models.families.qwen3 import Qwen3
from src.models.families.qwen3_moe import Qwen3Moe
from src.models.families.qwen3_next import Qwen3Next
from src.models.families.roberta import Roberta, XLMRoberta
from src.models.families.smollm3 import SmolLM3
from src.models.fields import Fields, read_json
from src.models.generation import parse_generation
from src.models.heads import HEADS
from src.models.heads.head import with_head
from src.models.weights.checkpoint_formats import CheckpointFormats
from src.models.weights.quantization_config import method_of, read_formats, section_of

FAMILIES: tuple[type[Family], ...] = (
    Cohere,
    Cohere2,
    DeepseekV2,
    DeepseekV3,
    Exaone4,
    Gemma,
    Gemma2,
    Gemma3,
    GraniteHybrid,
    Glm,
    Glm4,
    Glm4Moe,
    Granite,
    GraniteMoe,
    GptOss,
    Lfm2,
    Lfm2Moe,
    Llama,
    Llama4,
    Mistral,
    Mixtral,
    Olmo2,
    Olmo3,
    Phi3,
    Qwen2,
    Qwen2Moe,
    Qwen3,
    Qwen3Moe,
    Qwen3Next,
    SmolLM3,
)
ENCODERS: tuple[type[Family], ...] = (Bert, DistilBert, ModernBert, Roberta, XLMRoberta)
_ALL = (*FAMILIES, *ENCODERS)
_BY_ARCHITECTURE = {name: family for family in _ALL for name in family.architectures}
_HEADS = {head.architecture: head for head in HEADS}
_ENCODER_NAMES = tuple(name for family in ENCODERS for name in family.architectures)
_BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
_WRAPPERS = [(wrapper, family) for family in FAMILIES for wrapper in family.wrappers]


def supported_architectures() -> tuple[str, ...]:
    """The names that `architectures[0]` may have in checkpoints that continue text."""
    return tuple(name for name, family in _BY_ARCHITECTURE.items() if family.generates)


def add_family(family: type[Family]) -> None:
    """Serve the architectures of a family that is not of this package, in this process.

    Raises
    ------
    ValueError
        It names no architecture, or one, or a model type, that another family serves.
    """
    if not family.architectures or not family.model_type:
        raise ValueError(f"{family.__name__} must name architectures and a model_type")
    others = [
        *(_BY_ARCHITECTURE.get(name, family) for name in family.architectures),
        _BY_MODEL_TYPE.get(family.model_type, family),
    ]
    if other := next((each for each in others if each is not family), None):
        raise ValueError(f"{family.__name__} serves what {other.__name__} serves already")
    if family in _BY_MODEL_TYPE.values():
        return
    _BY_ARCHITECTURE.update(dict.fromkeys(family.architectures, family))
    _BY_MODEL_TYPE[family.model_type] = family
    _WRAPPERS.extend((wrapper, family) for wrapper in family.wrappers)


def has_family(raw: Mapping[str, Any]) -> bool:
    """Whether a native family answers to a `config.json`, as `load_config` reads it."""
    return _wrapper_of(raw) is not None or _chosen(raw) is not None


def _chosen(raw: Mapping[str, Any]) -> str | None:
    """The architecture that a native family runs a `config.json` as; None: there is none.

    `model_type` decides, as it does in transformers' AutoModelForCausalLM, if `architectures` is
    missing, or names a class that a family knows. Without a known `model_type` the class decides.
    """
    names, model_type = raw.get("architectures"), raw.get("model_type")
    family = _BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    if names is None or names == []:
        return None if family is None else family.architectures[0]
    name = names[0] if isinstance(names, list) else None
    if not isinstance(name, str):
        return None
    if name in _HEADS:
        return name if model_type in (None, family_of(name).model_type) else None
    if name in _BY_ARCHITECTURE:
        own = _BY_ARCHITECTURE[name]
        if not own.generates and model_type not in (None, own.model_type):
            # Others name their encoders after BERT's class, too.
            return None
        is_other = family is not None and name not in family.architectures
        return family.architectures[0] if family is not None and is_other else name
    # A decoder that was saved without its head.
    return family.architectures[0] if family is not None and name in _bodies(family) else None


def _bodies(family: type[Family]) -> set[str]:
    """Names of transformers' classes for a family's decoders without heads."""
    stems = [name.removesuffix("ForCausalLM") for name in family.architectures]
    return {f"{stem}{ending}" for stem in stems for ending in ("Model", "TextModel")}


def _wrapper_of(raw: Mapping[str, Any]) -> tuple[Wrapper, type[Family]] | None:
    """The wrapper whose `config.json` this is, and its family.

    A model of the family that was taken out of a wrapper and saved may have the wrapper's file.
    """
    names = raw.get("architectures")
    for wrapper, family in _WRAPPERS:
        is_of_type = raw.get("model_type") == wrapper.model_type
        own = [[name] for name in family.architectures]
        if names == [wrapper.architecture] or (is_of_type and names in (None, [], *own)):
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
    names = ("quantization_config", "compression_config")
    whole = {name: raw[name] for name in names if raw.get(name)}
    return {**text, **dtype, **whole, "architectures": [family.architectures[0]]}


def _prefixed(config: ModelConfig, wrapper: Wrapper) -> ModelConfig:
    """The same with the names that tensors have in a wrapper's checkpoint."""
    names = ("embedding_name", "layer_name", "final_norm_name", "head_name")
    changes: dict[str, Any] = {name: wrapper.prefix + getattr(config, name) for name in names}
    return replace(config, **changes, unread=(*config.unread, *wrapper.others))


def family_of(architecture: str) -> type[Family]:
    """The family that runs an architecture; of one with a classifier's head, that of its body.

    Raises
    ------
    ModelLoadError
        There is none; the message lists the supported architectures.
    """
    head = _HEADS.get(architecture)
    try:
        return _BY_ARCHITECTURE[architecture if head is None else head.body]
    except KeyError:
        raise ModelLoadError(
            f"architecture {architecture} is not supported; supported are "
            + ", ".join((*_BY_ARCHITECTURE, *_HEADS))
        ) from None


def architecture_of(raw: Mapping[str, Any], source: str) -> str:
    """The architecture to run a checkpoint as.

    It is `architectures[0]` or follows from `model_type`. Some converters and trainers write no
    `architectures`, or the class that they have trained.

    A checkpoint may bring code for a supported architecture; that code is never run. An encoder or
    a classifier that brings some is refused, because such code gives other vectors or scores.

    Raises
    ------
    ModelLoadError
        Remote code, or no architecture that a family can run.
    """
    chosen, names = _chosen(raw), raw.get("architectures")
    if chosen is not None:
        gives = "vectors" if not family_of(chosen).generates else None
        if chosen in _HEADS:
            gives = "scores"
        if raw.get("auto_map") and gives is not None:
            raise ModelLoadError(
                f"{source}: auto_map asks for code from the checkpoint, and without it {chosen} "
                f"may give other {gives}; remote code is refused"
            )
        return chosen
    if names is None or names == []:
        raise ModelLoadError(
            f"{source}: architectures must name a class, or model_type one of "
            f"{', '.join(_BY_MODEL_TYPE)}; model_type is {raw.get('model_type')!r}; encoders are "
            f"told by their class alone: {', '.join(_ENCODER_NAMES)}"
        )
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ModelLoadError(f"{source}: architectures must name a class, got {names!r}")
    if raw.get("auto_map"):
        raise ModelLoadError(
            f"{source}: auto_map asks for code from the checkpoint, since {names[0]} is not "
            "supported; remote code is refused"
        )
    return names[0]


def _formats_of(
    raw: Mapping[str, Any], path: Path, family: type[Family]
) -> CheckpointFormats | None:
    """The formats of a quantized checkpoint, unless the family itself reads them."""
    found = section_of(raw, path)
    if found is None:
        return None
    name, section = found
    if isinstance(section, Mapping) and method_of(section) in family.packings:
        return None
    source = path / "config.json" if name in raw else path
    return read_formats(name, section, str(source))


def load_config(path: Path) -> ModelConfig:
    """The configuration of a model directory, or of a GGUF file.

    No weights are read, but perhaps their dtype.

    Raises
    ------
    ModelLoadError
        `config.json` (of a GGUF file: its metadata) or `generation_config.json` is missing,
        malformed, or asks for something that is not supported.
    """
    source, raw = name_of_config(path), read_config_file(path)
    wrapped, given = _wrapper_of(raw), raw.get("architectures")
    if wrapped is not None:
        raw = _text_of(raw, wrapped[1], source)
    architecture = architecture_of(raw, source)
    family = family_of(architecture)
    formats = _formats_of(raw, path, family)
    raw = {**raw, "architectures": [architecture]}
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    fields = Fields(raw, source, family.defaults, names_of_fields(path))
    config = family.describe(fields)
    if architecture in _HEADS:
        config = with_head(config, _HEADS[architecture], fields)
    if wrapped is not None and given != [architecture]:
        config = _prefixed(config, wrapped[0])
    dtype = config.dtype
    if dtype is None:
        dtype = str(first_dtype(path) or torch.float32).removeprefix("torch.")
    defaults = parse_generation(raw, generation)
    config = replace(config, dtype=dtype, formats=formats, generation=defaults)
    if is_gguf(path):
        # Imported here because few checkpoints need it.
        from src.models.gguf.model import as_stored

        return as_stored(config, path)
    return config
