"""A GGUF file's metadata as the `config.json` of the same model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from src.core.errors import ModelLoadError
from src.core.gguf import GGUFFile, open_gguf
from src.core.gguf_tokens import GGUFTokens, shown
from src.models.gguf.architectures import Architecture, architecture_of
from src.models.gguf.rope import read_rope

# Keys behind an architecture's name that change what is computed, for architectures that read them,
# and the values that change nothing. RoPE's are in `gguf.rope`.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.scale", "attention.temperature_scale"), (0,)),
    "attention.causal": (True,),
    "attention.sliding_window_pattern": (),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0,)),
    "router_logit_softcapping": (0,),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), (0, 1)),
    **dict.fromkeys(("expert_weights_scale", "expert_gating_func", "expert_group_count"), (0, 1)),
    **dict.fromkeys(("leading_dense_block_count", "nextn_predict_layers"), (0,)),
    **dict.fromkeys(("use_parallel_residual", "pooling_type"), (0,)),
}
_VALUES: Final = "attention.value_length"
# Layers of the sizes of Gemma whose queries are scaled by the width of the model over its heads.
_WIDE_GEMMAS: Final = {("gemma2", 46), ("gemma3", 62)}


def read_configuration(path: Path) -> dict[str, Any]:
    """The object that `config.json` would hold. Of the weights only RoPE's factors are read.

    Raises
    ------
    ModelLoadError
        The file is damaged, or of an architecture or a kind of RoPE that is not served.
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
        **_special_tokens(file),
    }
    if architecture.model_type in ("llama", "qwen3", "granite", "smollm3", "olmo2"):
        raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if name.startswith("gemma"):
        raw |= _gemma(name, raw)
    _check_layers(file, f"{name}.block_count", raw.get("num_hidden_layers"))
    _refuse_unread(file, name, architecture, raw)
    return raw | read_rope(file, name, raw, architecture.keys)


def names_of_keys(path: Path) -> dict[str, str]:
    """Fields of `config.json` -> the keys of a file that they come from.

    Raises
    ------
    ModelLoadError
        See `read_configuration`.
    """
    file = open_gguf(path)
    name, architecture = architecture_of(file.metadata, str(path))
    return {field: f"{name}.{key}" for key, field in architecture.all_keys.items()}


def _fields(file: GGUFFile, name: str, architecture: Architecture) -> dict[str, Any]:
    fields = {}
    for key, field in architecture.all_keys.items():
        value = file.metadata.get(f"{name}.{key}")
        if isinstance(value, tuple):
            # One value per layer, as converters of models with layers of several sizes write them.
            layers = file.metadata.get(f"{name}.block_count")
            if len(value) != layers:
                raise ModelLoadError(
                    f"{file.path}: {name}.{key} must be one value or {shown(layers)}, one for each "
                    f"layer, got {shown(value)}"
                )
            if len(set(value)) != 1:
                raise ModelLoadError(f"{file.path}: {name}.{key} must be the same for all layers")
            value = value[0]
        if value is not None:
            fields[field] = value
    return fields


def _check_layers(file: GGUFFile, key: str, count: object) -> None:
    """Refuse layers that the file does not have: each takes time before it is missed."""
    last = f"blk.{count - 1}." if isinstance(count, int) else ""
    is_known = any(name.startswith("blk.0.") for name in file.tensors)
    if last and is_known and not any(name.startswith(last) for name in file.tensors):
        raise ModelLoadError(f"{file.path}: {key} = {count!r}, but there is no tensor {last}*")


def _refuse_unread(
    file: GGUFFile, name: str, architecture: Architecture, raw: Mapping[str, Any]
) -> None:
    """Refuse what would make another model of it, and is not honoured for its architecture."""
    neutral = dict(_NEUTRAL)
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads:
        neutral[_VALUES] = (raw.get("head_dim", hidden // heads),)
    # A window that no text is longer than is none.
    neutral["attention.sliding_window"] = (0, raw.get("max_position_embeddings"))
    if name == "gemma2":
        neutral["attention.sliding_window_pattern"] = (2,)
    for key, harmless in neutral.items():
        value = file.metadata.get(f"{name}.{key}")
        if key not in architecture.keys and value is not None and value not in harmless:
            which = f"; it must be {name}.attention.key_length" if key == _VALUES else ""
            raise ModelLoadError(f"{file.path}: {name}.{key} = {value!r} is not served{which}")


def _dtype(file: GGUFFile) -> str:
    """The widest float type of any matrix. Weights of few bits are computed with in bfloat16."""
    kinds = {each.type.name for each in file.tensors.values() if len(each.shape) > 1}
    names = {"F32": "float32", "F16": "float16"}
    if kinds == {"F32"}:
        return names["F32"]
    return names["F16"] if kinds <= {"F32", "F16"} else "bfloat16"


@functools.lru_cache(maxsize=1)
def _special_tokens(file: GGUFFile) -> Mapping[str, Any]:
    # A start asks several times, and a vocabulary takes tens of milliseconds.
    tokens = GGUFTokens(file.metadata, str(file.path))
    return {
        "bos_token_id": tokens.id_of("bos"),
        "eos_token_id": list(tokens.ends),
        "pad_token_id": tokens.id_of("padding"),
    }


def _gemma(name: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Files have no scale of queries. It follows from the size, as in llama.cpp."""
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    is_wide = (name, raw.get("num_hidden_layers")) in _WIDE_GEMMAS
    width = raw.get("head_dim", 256)
    if is_wide and isinstance(heads, int) and isinstance(hidden, int) and heads:
        width = hidden // heads
    return {"query_pre_attn_scalar": width}
