"""`generation_config.json`: the sampling defaults that a checkpoint ships."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from src.core.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling defaults that a checkpoint ships; None where it has none."""

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


def parse_generation(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None
) -> GenerationDefaults:
    """Sampling defaults from `generation_config.json`; missing token ids from `config.json`.

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
