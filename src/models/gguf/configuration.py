"""A GGUF file's metadata as the `config.json` of the same model."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from src.core.errors import ModelLoadError
from src.core.gguf import GGUFFile, GGUFTensor, open_gguf
from src.models.gguf.architectures import Architecture, architecture_of

# Tokens that end a turn. Files name one as the end, and others only by their text.
_TURN_ENDS: Final = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|eom_id|>", "<|end_of_role|>"),
)
_CONTROL: Final = 3
_FACTORS: Final = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_MOST_FACTORS: Final = 1024
# Layers of the sizes of Gemma whose queries are scaled by the width of the model over its heads.
_WIDE_GEMMAS: Final = {("gemma2", 46), ("gemma3", 62)}


def read_configuration(path: Path) -> dict[str, Any]:
    """The object that `config.json` would hold. Of the weights only RoPE's factors are read.

    Raises:
        ModelLoadError: the file is damaged, or of an architecture or a kind of RoPE that is not
            served.
    """
    file = open_gguf(path)
    name, architecture = architecture_of(file.metadata, str(path))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{path} has no matrix token_embd.weight")
    raw: dict[str, Any] = {
        "model_type": architecture.model_type,
        **architecture.fixed,
        **_fields(file, name, architecture),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        **_special_tokens(file.metadata),
    }
    if architecture.model_type in ("llama", "qwen3", "granite", "smollm3", "olmo2"):
        raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if name.startswith("gemma"):
        raw |= _gemma(name, raw)
    rope = _rope(file, name, raw)
    return raw | rope


def _fields(file: GGUFFile, name: str, architecture: Architecture) -> dict[str, Any]:
    fields = {}
    for key, field in architecture.all_keys.items():
        value = file.metadata.get(f"{name}.{key}")
        if isinstance(value, tuple):
            # One value per layer, as converters of models with layers of several sizes write them.
            if len(set(value)) != 1:
                raise ModelLoadError(f"{file.path}: {name}.{key} must be the same for all layers")
            value = value[0]
        if value is not None:
            fields[field] = value
    return fields


def _dtype(file: GGUFFile) -> str:
    """The widest float type of any matrix. Weights of few bits are computed with in bfloat16."""
    kinds = {each.type.name for each in file.tensors.values() if len(each.shape) > 1}
    names = {"F32": "float32", "F16": "float16"}
    if kinds == {"F32"}:
        return names["F32"]
    return names["F16"] if kinds <= {"F32", "F16"} else "bfloat16"


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    ends = [metadata.get(f"{prefix}{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = metadata.get(f"{prefix}tokens") or ()
    kinds = metadata.get(f"{prefix}token_type") or ()
    ends += [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _TURN_ENDS
    ]
    return {
        "bos_token_id": metadata.get(f"{prefix}bos_token_id"),
        "eos_token_id": list(dict.fromkeys(each for each in ends if each is not None)),
        "pad_token_id": metadata.get(f"{prefix}padding_token_id"),
    }


def _gemma(name: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Files have no scale of queries. It follows from the size, as in llama.cpp."""
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    is_wide = (name, raw.get("num_hidden_layers")) in _WIDE_GEMMAS
    width = raw.get("head_dim", 256)
    if is_wide and isinstance(heads, int) and isinstance(hidden, int) and heads:
        width = hidden // heads
    return {"query_pre_attn_scalar": width}


def _rope(file: GGUFFile, name: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{name}.rope."
    given = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    rope: dict[str, Any] = {}
    if "freq_base" in given:
        rope["rope_theta"] = given["freq_base"]
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads and "dimension_count" in given:
        head_dim, rotated = raw.get("head_dim") or hidden // heads, given["dimension_count"]
        if type(rotated) is not int or type(head_dim) is not int or not 0 < rotated <= head_dim:
            raise ModelLoadError(
                f"{file.path}: {prefix}dimension_count must be from 1 to {head_dim!r}, the size of "
                f"a head, got {rotated!r}"
            )
        if rotated != head_dim:
            rope["partial_rotary_factor"] = rotated / head_dim
    scaling = _scaling(file, given, raw)
    if scaling is not None and "original_max_position_embeddings" in scaling:
        # Some families have a default for this one, which stands beside the object.
        name = "original_max_position_embeddings"
        rope[name] = scaling[name]
    return rope | ({} if scaling is None else {"rope_scaling": scaling})


def _scaling(
    file: GGUFFile, given: Mapping[str, Any], raw: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The object `rope_scaling`."""
    kind = given.get("scaling.type", "none")
    factor = given.get("scaling.factor", given.get("scale_linear"))
    original = given.get("scaling.original_context_length")
    attention = given.get("scaling.attn_factor")
    if _LONG in file.tensors or _SHORT in file.tensors:
        # Phi's; a file with one set of factors alone uses it at any length.
        short = file.tensors.get(_SHORT) or file.tensors[_LONG]
        return _without_none(
            rope_type="longrope",
            short_factor=_factors(short),
            long_factor=_factors(file.tensors.get(_LONG) or short),
            original_max_position_embeddings=original,
            attention_factor=attention,
        )
    if _FACTORS in file.tensors:
        # Llama 3's scaling, worked out by the converter: a divisor of each frequency. They are used
        # as they are, at any length.
        factors = _factors(file.tensors[_FACTORS])
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "original_max_position_embeddings": raw.get("max_position_embeddings"),
            "attention_factor": 1.0,
        }
    if kind == "none" and factor is None:
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor not in (None, 0.0, 1.0) else None
    if kind == "yarn":
        return _without_none(
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=attention or given.get("scaling.yarn_attn_factor"),
            beta_fast=given.get("scaling.yarn_beta_fast"),
            beta_slow=given.get("scaling.yarn_beta_slow"),
        )
    raise ModelLoadError(
        f"{file.path}: rope.scaling.type {kind!r} is not served; served are none, linear and yarn, "
        "and factors in tensors"
    )


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _factors(tensor: GGUFTensor) -> list[float]:
    """A small float32 tensor's values."""
    count = tensor.shape[-1]
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or count > _MOST_FACTORS:
        raise ModelLoadError(
            f"{tensor.file}: {tensor.name} must be at most {_MOST_FACTORS} numbers of type F32"
        )
    descriptor = os.open(tensor.file, os.O_RDONLY)
    try:
        data = os.pread(descriptor, tensor.size, tensor.offset)
    finally:
        os.close(descriptor)
    return list(struct.unpack(f"<{count}f", data))
