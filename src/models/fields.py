"""Typed access to `config.json`.

No model library is imported. The configuration is a JSON file, and every value in it that this
engine cannot honour is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from src.core.config import INT32_MAX
from src.core.errors import ModelLoadError
from src.models.layers.activations import SPELLINGS, Activation
from src.models.layers.rope import RopeConfig, parse_rope
from src.ops.states.causal_convolution import MAX_TAPS

LAYER_TYPES = ("full_attention", "sliding_attention")
_OLD_KINDS = {"attention": "full_attention"}
# Far more than any model has. A program is written layer by layer and expert by expert, so a
# configuration with larger numbers would take all memory before anything could be refused.
_MOST = {
    "num_hidden_layers": 1024,
    "num_experts": 1024,
    "num_local_experts": 1024,
    "n_routed_experts": 1024,
    # Products of these are sizes of tensors, which must stay far below 2**63 bytes.
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "hidden_size": 2**24,
    "intermediate_size": 2**24,
    "moe_intermediate_size": 2**24,
    # What kernels can hold.
    "linear_conv_kernel_dim": MAX_TAPS,
    "mamba_d_conv": MAX_TAPS,
    "conv_L_cache": MAX_TAPS,
}
# What is computed with these numbers is in float32. JSON's may be larger than any float.
_MOST_FLOAT32 = 3.4e38


class Fields:
    """Typed access to a JSON object. An error names the field, its value and what was expected.

    `defaults` are the family's values for missing fields. An explicit `null` is kept, because
    families read it as "none". `keys` are other names of fields in the file, for errors.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        defaults: Mapping[str, Any],
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self._keys = keys or {}
        self._given = values
        self._values = {**defaults, **values}
        if values.get("rope_parameters") is None and "rope_parameters" in defaults:
            # This one alone means the same as if it were missing.
            self._values["rope_parameters"] = defaults["rope_parameters"]
        self._source = source

    def error(self, name: str, expected: str) -> ModelLoadError:
        """The error for a field whose value is not what is expected."""
        value = self._values.get(name, "nothing")
        key = self._keys.get(name)
        shown = name if key is None else f"{key} ({name})"
        return ModelLoadError(f"{self._source}: {shown} must be {expected}, got {value!r}")

    def raw(self, name: str) -> Any:
        """The unchecked value, or None."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer, no larger than what sizes of tensors can hold."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "a positive integer")
        most = _MOST.get(name, INT32_MAX)
        if value > most:
            raise self.error(name, f"at most {most}")
        return value

    def count(self, *names: str) -> int:
        """An integer from 0 on, from the first of these fields that is present; else 0."""
        name = next((name for name in names if self.raw(name) is not None), None)
        value = 0 if name is None else self.raw(name)
        if name is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 0
        ):
            raise self.error(name, "an integer >= 0")
        return int(value)

    def optional_integer(self, name: str) -> int | None:
        """A positive integer or None."""
        return None if self._values.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a positive number")
        if not 0 < value <= _MOST_FLOAT32:
            raise self.error(name, "a positive number that float32 holds")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A positive number or None."""
        return None if self._values.get(name) is None else self.number(name)

    def same_integer(self, *names: str) -> int:
        """A positive integer that has several names.

        The file may give any of them, or several if they agree. If it gives none, the family's
        default counts.
        """
        given = [name for name in names if self._given.get(name) is not None]
        known = given or [name for name in names if self.raw(name) is not None] or names[:1]
        values = {name: self.integer(name) for name in known}
        if len(set(values.values())) > 1:
            raise self.error(known[0], f"equal to {known[1]}={values[known[1]]}")
        return values[known[0]]

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers; empty if there is no list."""
        values = self._values.get(name) or []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self.error(name, "a list of integers")
        return tuple(values)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def strings(self, name: str, length: int, among: Sequence[str]) -> tuple[str, ...] | None:
        """A list of ``length`` strings out of ``among``, or None."""
        values = self.raw(name)
        if values is None:
            return None
        if isinstance(values, list):
            values = [
                _OLD_KINDS.get(value, value) if isinstance(value, str) else value
                for value in values
            ]
        if not isinstance(values, list) or len(values) != length:
            raise self.error(name, f"a list of {length} entries")
        if unknown := {str(value) for value in values if value not in among}:
            raise self.error(name, f"made of {tuple(among)} (not {sorted(unknown)})")
        return tuple(values)

    def activation(self, *names: str) -> Activation:
        """The activation named by the first of these fields that is present; silu if none is."""
        for name in names:
            value = self.raw(name)
            if value is not None:
                if not isinstance(value, str) or value not in SPELLINGS:
                    raise self.error(name, f"one of {', '.join(SPELLINGS)}")
                return SPELLINGS[value]
        return "silu"

    def dtype(self) -> str | None:
        """The dtype of weights, from either of its fields; None if neither says."""
        value = self.raw("dtype") or self.raw("torch_dtype") or "auto"
        return None if value == "auto" else str(value).removeprefix("torch.")

    def windows(self, kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
        """The window of each layer, by its kind."""
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def rope(
        self,
        max_position_embeddings: int,
        kind: str | None = None,
        theta: tuple[str | None, float] | None = None,
        *,
        partial: bool = False,
    ) -> RopeConfig:
        """RoPE's parameters.

        Parameters
        ----------
        max_position_embeddings
            Tokens that the model was trained for.
        kind
            Kind of layers, if `rope_parameters` differ by kind. `rope_scaling` applies to layers
            with full attention only.
        theta
            Name of the field with this kind's base, if there is one, and its default.
        partial
            Whether the family honours `partial_rotary_factor`; otherwise it is refused.
        """
        raw = dict(self._values)
        if theta is not None:
            name, default = theta
            raw["rope_theta"] = (raw.get(name) if name else None) or default
        parameters = raw.get("rope_parameters")
        if kind is not None and isinstance(parameters, Mapping):
            if unknown := [each for each in parameters if each not in LAYER_TYPES]:
                raise self.error("rope_parameters", f"by {LAYER_TYPES} (not {unknown})")
            raw["rope_parameters"] = parameters.get(kind)
        if kind == "sliding_attention":
            raw.pop("rope_scaling", None)
        return parse_rope(raw, max_position_embeddings, partial=partial)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises
    ------
    ModelLoadError
        The file is missing, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}: not a model directory") from None
    except RecursionError:
        raise ModelLoadError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
