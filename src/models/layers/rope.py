"""Rotary position embedding: its variants, and the table of cosines and sines for the layers.

Su et al., "RoFormer" (2021), section 3.4. Variants: linear interpolation (Chen et al. 2023),
dynamic NTK (bloc97 and emozilla 2023), YaRN (Peng et al. 2023, section 3), Llama 3.1's scaling by
wavelength, LongRoPE (Ding et al. 2024). The frequencies follow transformers operation by operation,
so that float32 tables agree to rounding.

The dynamic variant changes its base with the *current* length once that exceeds
`max_position_embeddings`, so cached keys would have to be rotated again. Here all sequences use one
table, which is built for the longest allowed sequence (`max_model_len`):

- up to `max_position_embeddings` (the default limit) this is exactly the reference;
- a longer `max_model_len`, up to `factor` times, rotates *every* sequence with the base of that
  length, as the reference does in one forward pass over `max_model_len` tokens. Results then do not
  depend on chunking or on the prefix cache, and shorter sequences differ slightly from the
  reference.

LongRoPE has two sets of frequencies, and the reference changes to the second when the current
length exceeds `original_max_position_embeddings`. Here `max_model_len` selects one set for all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from src.core.config import INT32_MAX
from src.core.errors import ModelLoadError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_DEFAULT_THETA = 10_000.0
_LARGEST = sys.float_info.max  # An integer of JSON may be larger.
_STRETCHING = ("linear", "dynamic", "yarn")  # variants whose context grows with `factor`
_OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of one RoPE variant, under the names of `config.json`."""

    rope_type: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # tokens; llama3, yarn and longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # longrope and yarn, and those below
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None  # all but default: latent attention scales by it too
    truncate: bool = True
    # linear: whether `max_position_embeddings` is the stretched length, as it is for llama3.
    states_stretched: bool = False
    # longrope: divisors of each frequency, up to the original length and beyond.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """How many elements of a head are rotated.

        Raises
        ------
        ModelLoadError
            The number is odd or out of range; or the number of factors of `longrope` is not the
            number of pairs; or `dynamic` has a single pair.
        """
        rotated = int(head_dim * self.partial_rotary_factor)
        if rotated < 2 or rotated % 2 or rotated > head_dim:
            raise ModelLoadError(
                f"config.json: partial_rotary_factor={self.partial_rotary_factor} must be of an "
                f"even number of the {head_dim} elements of a head, got {rotated}"
            )
        if self.rope_type == "dynamic" and rotated == 2:
            raise ModelLoadError(
                "config.json: rope type 'dynamic' needs two pairs of a head or more"
            )
        for name, factors in (("short", self.short_factor), ("long", self.long_factor)):
            if self.rope_type == "longrope" and len(factors) != rotated // 2:
                raise ModelLoadError(
                    f"config.json: rope's {name}_factor must be a list of {rotated // 2} numbers, "
                    f"got {len(factors)}"
                )
        return rotated

    def context_length(self, max_position_embeddings: int) -> int:
        """The longest sequence, in tokens, that these parameters are made for.

        `linear` and `yarn` stretch the trained length by `factor`. Files of `llama3`, and of
        `linear` with `states_stretched`, give the stretched length. `dynamic` is exact up to the
        trained length, `longrope` up to the original length (see the module's docstring).
        """
        if self.rope_type == "linear" and not self.states_stretched:
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            stretched = int(self.original_max_position_embeddings * self.factor)
            return max(stretched, max_position_embeddings)
        if self.rope_type == "longrope":
            return min(self.original_max_position_embeddings, max_position_embeddings)
        return max_position_embeddings

    def limit(self, max_position_embeddings: int) -> int:
        """The largest allowed `max_model_len`, in tokens."""
        if self.rope_type == "dynamic":
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "longrope":
            return max_position_embeddings
        return self.context_length(max_position_embeddings)


def parse_rope(
    raw: Mapping[str, Any], max_position_embeddings: int, *, partial: bool = False
) -> RopeConfig:
    """RoPE parameters from `rope_parameters`, `rope_scaling` or plain `rope_theta`.

    `partial` says whether `partial_rotary_factor` is honoured; otherwise it is refused.

    Raises
    ------
    ModelLoadError
        An unsupported variant or a parameter that is missing or malformed.
    """
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ModelLoadError(f"config.json: rope parameters must be an object, got {scaling!r}")
    if nested := [key for key, value in scaling.items() if isinstance(value, Mapping)]:
        raise ModelLoadError(
            f"config.json: rope parameters by layer type ({', '.join(nested)}) are not supported"
        )
    name = "partial_rotary_factor"
    share = _number({name: scaling.get(name, raw.get(name))}, name, 1.0)
    if share != 1.0 and not partial:
        raise ModelLoadError(f"config.json: {name}={share} is not supported")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(rope_type, str) or _OLD_NAMES.get(rope_type, rope_type) not in ROPE_TYPES:
        raise ModelLoadError(
            f"config.json: rope type {rope_type!r} is not supported, one of {', '.join(ROPE_TYPES)}"
        )
    rope_type = _OLD_NAMES.get(rope_type, rope_type)
    theta = _number(scaling, "rope_theta", _number(raw, "rope_theta", _DEFAULT_THETA))
    if rope_type == "default":
        return RopeConfig(theta=theta, partial_rotary_factor=share)
    name = "original_max_position_embeddings"
    original = int(_number(raw, name, _number(scaling, name, max_position_embeddings)))
    if not 1 <= original <= INT32_MAX:
        raise ModelLoadError(f"config.json: rope's {name} must be from 1 to {INT32_MAX}")
    if rope_type == "yarn" and theta <= 1:
        raise ModelLoadError(f"config.json: rope_theta must be more than 1 for yarn, got {theta}")
    stretch = max_position_embeddings / original
    implied = {"yarn": stretch, "longrope": max(stretch, 1.0)}.get(rope_type)
    factor = _number(scaling, "factor", implied)
    if not 1 <= factor <= INT32_MAX:
        raise ModelLoadError(
            f"config.json: rope factor must be from 1 to {INT32_MAX}, got {factor}"
        )
    stretched = original if rope_type == "yarn" else max_position_embeddings
    if rope_type in _STRETCHING and stretched * factor > INT32_MAX:
        raise ModelLoadError(
            f"config.json: rope factor {factor} makes {stretched} positions more than {INT32_MAX}"
        )
    shared: dict[str, Any] = {
        "rope_type": rope_type,
        "theta": theta,
        "factor": factor,
        "partial_rotary_factor": share,
        "mscale_all_dim": _optional_number(scaling, "mscale_all_dim"),
    }
    if rope_type == "longrope":
        return RopeConfig(
            **shared,
            original_max_position_embeddings=original,
            attention_factor=_optional_number(scaling, "attention_factor"),
            short_factor=_numbers(scaling, "short_factor"),
            long_factor=_numbers(scaling, "long_factor"),
        )
    if rope_type == "llama3":
        return RopeConfig(
            **shared,
            original_max_position_embeddings=original,
            low_freq_factor=_number(scaling, "low_freq_factor"),
            high_freq_factor=_number(scaling, "high_freq_factor"),
        )
    if rope_type == "yarn":
        return RopeConfig(
            **shared,
            original_max_position_embeddings=original,
            attention_factor=_optional_number(scaling, "attention_factor"),
            beta_fast=_optional_number(scaling, "beta_fast") or 32.0,
            beta_slow=_optional_number(scaling, "beta_slow") or 1.0,
            mscale=_optional_number(scaling, "mscale"),
            truncate=bool(scaling.get("truncate", True)),
        )
    return RopeConfig(**shared)


def _optional_number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise ModelLoadError(f"config.json: rope's {name} must be a number >= 0, got {value!r}")
    return float(value)


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = _optional_number(values, name)
    value = default if value is None else value
    if value is None or not value > 0:
        raise ModelLoadError(f"config.json: rope's {name} must be a positive number, got {value!r}")
    return float(value)


def _numbers(values: Mapping[str, Any], name: str) -> tuple[float, ...]:
    value = values.get(name)
    if not isinstance(value, list):
        raise ModelLoadError(f"config.json: rope's {name} must be a list of numbers, got {value!r}")
    return tuple(_number({name: each}, name) for each in value)


def rope_table(
    rope: RopeConfig, head_dim: int, max_position_embeddings: int, length: int
) -> torch.Tensor:
    """Cosines and sines of every position.

    Returns
    -------
    float32 [length, head_dim]; row p holds head_dim/2 cosines, then head_dim/2 sines, for position
    p, both multiplied by YaRN's or LongRoPE's attention factor.
    """
    frequencies, scale = inverse_frequencies(rope, head_dim, max_position_embeddings, length)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_position_embeddings: int, length: int
) -> tuple[torch.Tensor, float]:
    """Angular frequencies, float32 [head_dim/2] in radians per position, and the table's factor.

    `length` is the longest sequence in tokens; only `dynamic` and `longrope` depend on it.
    """
    theta = rope.theta
    if rope.rope_type == "dynamic":
        stretch = rope.factor * max(length, max_position_embeddings) / max_position_embeddings
        theta *= (stretch - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    wavelengths = theta**exponents
    if rope.rope_type == "linear":
        return 1.0 / wavelengths / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, 1.0 / wavelengths), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, wavelengths, head_dim), _yarn_attention_factor(rope)
    if rope.rope_type == "longrope":
        is_long = length > rope.original_max_position_embeddings
        factors = torch.tensor(rope.long_factor if is_long else rope.short_factor)
        return 1.0 / (factors * wavelengths), _longrope_attention_factor(rope)
    return 1.0 / wavelengths, 1.0


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > original / low, wavelengths < original / high
    scaled = torch.where(is_long, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(~is_short & ~is_long, smoothed, scaled)


def _yarn(rope: RopeConfig, wavelengths: torch.Tensor, head_dim: int) -> torch.Tensor:
    original = rope.original_max_position_embeddings

    def dimension(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    extrapolated = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - extrapolated) + 1.0 / wavelengths * extrapolated


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale()


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
