"""RoPE of a GGUF file: its metadata in the form of `config.json`.

What llama.cpp reads is honoured, and what has no form in `config.json` is refused by name: a model
with another RoPE talks well for a while and then loses the thread.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from typing import Any, Final

from src.core.config import INT32_MAX
from src.core.errors import ModelLoadError
from src.core.gguf import GGUFFile, GGUFTensor

_FACTORS: Final = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_MOST_FACTORS: Final = 1024
# Keys behind `<architecture>.rope.` that are read here. `freq_base_swa` is a key of architectures.
_READ: Final = frozenset(
    (
        *("dimension_count", "freq_base", "scale_linear", "scaling.type", "scaling.factor"),
        *("scaling.attn_factor", "scaling.original_context_length"),
        *("scaling.yarn_beta_fast", "scaling.yarn_beta_slow"),
    )
)
# Keys that say nothing if they have one of these values.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "scaling.alpha": (0.0, 1.0),
    "scaling.yarn_attn_factor": (1.0,),
    "scaling.yarn_log_multiplier": (0.0,),
}


def read_rope(
    file: GGUFFile, name: str, raw: Mapping[str, Any], others: Mapping[str, str]
) -> dict[str, Any]:
    """The fields of `config.json` for RoPE.

    Parameters
    ----------
    file
        Its header; of its tensors only factors of frequencies are read.
    name
        Of the architecture.
    raw
        The fields that were read before.
    others
        Keys of the architecture that are read elsewhere, behind its name.

    Raises
    ------
    ModelLoadError
        a key has a value that is none, or asks for what is not served.
    """
    given = _Given(file, f"{name}.rope.")
    given.refuse_unread(raw, others)
    rope: dict[str, Any] = {}
    if (base := given.number("freq_base")) is not None:
        if base <= 0:
            raise given.error("freq_base", "a positive number")
        rope["rope_theta"] = base
    scaling = _scaling(file, given, raw)
    if (share := _rotated(given, raw)) is not None:
        rope["partial_rotary_factor"] = share
    if scaling is None:
        return rope
    if "original_max_position_embeddings" in scaling:
        # Some families have a default for this one, which stands beside the object.
        rope["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return rope | {"rope_scaling": scaling}


class _Given:
    """The keys of a file for RoPE, without what stands before."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self._source, self.prefix = str(file.path), prefix
        self.values = {
            key.removeprefix(prefix): value
            for key, value in file.metadata.items()
            if key.startswith(prefix)
        }

    def error(self, key: str, expected: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self._source}: {self.prefix}{key} must be {expected}, got {self.values.get(key)!r}"
        )

    def number(self, key: str) -> float | None:
        """A finite number, or None if there is no such key."""
        value = self.values.get(key)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise self.error(key, "a number")
        return value  # type: ignore[no-any-return]

    def refuse_unread(self, raw: Mapping[str, Any], others: Mapping[str, str]) -> None:
        """Refuse keys that nothing reads, unless they say what holds anyway."""
        neutral = dict(_NEUTRAL)
        neutral["dimension_count_swa"] = (self.values.get("dimension_count", raw.get("head_dim")),)
        neutral["freq_base_swa"] = (self.values.get("freq_base", 10_000.0),)
        # It tells how a model was trained, but of Granite whether there is RoPE at all.
        is_granite = self.prefix.startswith("granite.")
        neutral["scaling.finetuned"] = (True,) if is_granite else (True, False)
        # Shares of the two ways of reading frequencies. Below 0 it follows from the type.
        is_yarn = self.values.get("scaling.type") == "yarn"
        neutral["scaling.yarn_ext_factor"] = (-1.0, 1.0 if is_yarn else 0.0)
        for key, value in self.values.items():
            if key in _READ or f"rope.{key}" in others or value in neutral.get(key, ()):
                continue
            if key == "dimension_sections" and isinstance(value, tuple) and not any(value):
                continue
            known = " or ".join(map(repr, neutral.get(key, ())))
            raise self.error(key, f"{known}: others are not served" if known else "absent")


def _rotated(given: _Given, raw: Mapping[str, Any]) -> float | None:
    """The share of a head that is rotated; None: all, or nothing is said."""
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    if not (isinstance(heads, int) and isinstance(hidden, int) and heads):
        return None
    rotated = given.values.get("dimension_count")
    if rotated is None:
        return None
    head_dim = raw.get("head_dim") or hidden // heads
    if type(rotated) is not int or type(head_dim) is not int or not 0 < rotated <= head_dim:
        raise given.error("dimension_count", f"from 1 to {head_dim!r}, the size of a head")
    return None if rotated == head_dim else rotated / head_dim


def _scaling(file: GGUFFile, given: _Given, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The object `rope_scaling`."""
    kind = given.values.get("scaling.type", "linear")
    factor = given.number("scaling.factor")
    factor = given.number("scale_linear") if factor is None else factor
    if kind == "none" or factor is None or factor == 0:
        factor = 1.0
    if factor < 1:
        raise given.error("scaling.factor", "1 or more")
    length = raw.get("max_position_embeddings")
    if factor > INT32_MAX or (isinstance(length, int) and factor * length > INT32_MAX):
        key = given.prefix.replace("rope.", "context_length")
        raise given.error(
            "scaling.factor", f"at most {INT32_MAX}, and so must its product with {key}"
        )
    # Multiplies what follows from the rest; `config.json` has the product.
    attention = given.number("scaling.attn_factor")
    attention = 1.0 if attention is None else attention
    if factors := _factors_of(file, given, raw):
        if factor != 1 or kind == "yarn":
            raise given.error("scaling.factor", f"1 with factors of {', '.join(factors['names'])}")
        del factors["names"]
        return factors | {"attention_factor": attention}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": given.number("scaling.original_context_length"),
            "beta_fast": given.number("scaling.yarn_beta_fast"),
            "beta_slow": given.number("scaling.yarn_beta_slow"),
            "attention_factor": attention * (0.1 * math.log(factor) + 1),
        }
        return {key: value for key, value in scaling.items() if value is not None}
    if kind not in ("none", "linear"):
        raise ModelLoadError(
            f"{file.path}: {given.prefix}scaling.type {kind!r} is not served; served are none, "
            "linear and yarn, and factors in tensors"
        )
    if attention != 1:
        raise given.error("scaling.attn_factor", f"1 with scaling.type {kind!r}")
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _factors_of(file: GGUFFile, given: _Given, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of RoPE with a divisor of each frequency, and the names of the tensors."""
    if _LONG in file.tensors or _SHORT in file.tensors:
        # Phi's; a file with one set of factors alone uses it at any length.
        short = file.tensors.get(_SHORT) or file.tensors[_LONG]
        found: dict[str, Any] = {
            "names": [_SHORT, _LONG],
            "rope_type": "longrope",
            "short_factor": _factors(short),
            "long_factor": _factors(file.tensors.get(_LONG) or short),
        }
        original = given.number("scaling.original_context_length")
        if original is not None:
            found["original_max_position_embeddings"] = original
        return found
    if _FACTORS in file.tensors:
        # Llama 3's scaling, worked out by the converter. They are used as they are, at any length.
        factors = _factors(file.tensors[_FACTORS])
        return {
            "names": [_FACTORS],
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "original_max_position_embeddings": raw.get("max_position_embeddings"),
        }
    return {}


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
