"""`config.json` and `generation_config.json`, read into plain frozen data.

No model library is imported: a checkpoint's configuration is a JSON file, and everything that this
engine cannot honour in it is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.core.errors import ModelLoadError
from src.models.rope import RopeConfig, parse_rope

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
DTYPE_NAMES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = ("silu", "swish")
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Variant:
    """What sets one family apart from the plain dense decoder."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # One entry per layer: how many tokens a query sees, itself included; None is all of them.
    sliding_windows: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling defaults that a checkpoint ships; None where it says nothing."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder's shape and numerics. `dtype` is the checkpoint's own."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str
    variant: Variant
    generation: GenerationDefaults

    @property
    def max_positions(self) -> int:
        """The longest sequence, in tokens, that the position encoding is made for."""
        return self.rope.context_length(self.max_position_embeddings)


class Fields:
    """Typed access to a JSON object; a refusal names field, value and expectation.

    `defaults` are the family's values for fields that the file leaves out; an explicit `null` is
    kept, since families read it as "none".
    """

    def __init__(self, values: Mapping[str, Any], source: str, defaults: Mapping[str, Any]) -> None:
        self._values = {**defaults, **values}
        self._source = source

    def error(self, name: str, expected: str) -> ModelLoadError:
        """The error for a field whose value is not what is expected."""
        value = self._values.get(name, "nothing")
        return ModelLoadError(f"{self._source}: {name} must be {expected}, got {value!r}")

    def raw(self, name: str) -> Any:
        """The value as it stands, or None."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "a positive integer")
        return value

    def optional_integer(self, name: str) -> int | None:
        """A positive integer or None."""
        return None if self._values.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, "a positive number")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def layer_windows(self, num_layers: int) -> tuple[int | None, ...]:
        """Windows of the families with `use_sliding_window`, `max_window_layers`, `layer_types`.

        Without `use_sliding_window` no layer has one. `layer_types`, where given, decides; else the
        layers from `max_window_layers` on are windowed.
        """
        window = self.integer("sliding_window") if self._windowed() else None
        kinds = self.raw("layer_types")
        if kinds is None:
            first = self.raw("max_window_layers")
            if window is not None and (isinstance(first, bool) or not isinstance(first, int)):
                raise self.error("max_window_layers", "an integer")
            return tuple(
                window if window is not None and layer >= first else None
                for layer in range(num_layers)
            )
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise self.error("layer_types", f"a list of {num_layers} entries")
        if unknown := set(kinds) - set(_LAYER_TYPES):
            raise self.error("layer_types", f"made of {_LAYER_TYPES} (not {sorted(unknown)})")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def _windowed(self) -> bool:
        return self.boolean("use_sliding_window") and self.raw("sliding_window") is not None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelLoadError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}: not a model directory") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def architecture_of(raw: Mapping[str, Any], source: str) -> str:
    """`architectures[0]`, after refusing what no family of ours can honour.

    Raises:
        ModelLoadError: remote code, a quantized checkpoint, or no architecture.
    """
    if raw.get("auto_map"):
        raise ModelLoadError(
            f"{source}: auto_map asks for code from the checkpoint; remote code is refused"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise ModelLoadError(
            f"{source}: quantization_config ({method}) is not supported; "
            "use the unquantized checkpoint"
        )
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelLoadError(f"{source}: architectures must name a class, got {names!r}")
    return names[0]


def parse_config(
    raw: Mapping[str, Any], fields: Fields, variant: Variant, generation: GenerationDefaults
) -> ModelConfig:
    """The configuration of a dense decoder.

    Raises:
        ModelLoadError: a field is missing, of the wrong type or out of bounds, or asks for
            something that is not supported; the message names it.
    """
    activation = fields.raw("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise fields.error("hidden_act", "'silu' (no other activation is supported)")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    head_dim = fields.integer("head_dim", default=max(hidden // heads, 1))
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM:
        raise ModelLoadError(
            f"head_dim must be a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}, "
            f"got {head_dim}"
        )
    max_positions = fields.integer("max_position_embeddings", default=2048)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return ModelConfig(
        architecture=raw["architectures"][0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        max_position_embeddings=max_positions,
        rope=parse_rope(raw, max_positions),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        dtype=dtype,
        variant=variant,
        generation=generation,
    )


def parse_generation(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None
) -> GenerationDefaults:
    """Sampling defaults: what `generation_config.json` says, token ids else from `config.json`.

    Raises:
        ModelLoadError: a value of the wrong type.
    """
    source = "generation_config.json" if generation is not None else "config.json"
    merged: dict[str, Any] = {
        name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    merged.update({k: v for k, v in (generation or {}).items() if v is not None})

    def read(name: str, *kinds: type) -> Any:
        value = merged.get(name)
        if value is not None and (not isinstance(value, kinds) or _is_misplaced_bool(value, kinds)):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ModelLoadError(f"{source}: {name} must be {wanted}, got {value!r}")
        return value

    eos = read("eos_token_id", int, list)
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if not all(isinstance(token, int) for token in eos_ids):
        raise ModelLoadError(f"{source}: eos_token_id must be token ids, got {eos!r}")
    return GenerationDefaults(
        eos_token_ids=eos_ids,
        bos_token_id=read("bos_token_id", int),
        pad_token_id=read("pad_token_id", int),
        do_sample=read("do_sample", bool),
        temperature=read("temperature", int, float),
        top_p=read("top_p", int, float),
        top_k=read("top_k", int),
        min_p=read("min_p", int, float),
        repetition_penalty=read("repetition_penalty", int, float),
        max_new_tokens=read("max_new_tokens", int),
    )


def _is_misplaced_bool(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, bool) and bool not in kinds
