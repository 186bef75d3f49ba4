"""`generation_config.json`: the sampling defaults that a checkpoint ships."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from src.core.errors import ModelLoadError
from src.core.sampler_parameters import SAMPLER_PARAMETERS


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling defaults that a checkpoint ships; None where it has none."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    # Sampler parameters by their names, those that the checkpoint gives.
    sampling: Mapping[str, float] = field(default_factory=dict)


def parse_generation(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None
) -> GenerationDefaults:
    """Sampling defaults from `generation_config.json`; missing token ids from `config.json`.

    Raises
    ------
    ModelLoadError
        a value of the wrong type.
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
    sampling = {}
    for each in SAMPLER_PARAMETERS:
        if each.from_checkpoint:
            value = read(each.name, *((int,) if each.kind is int else (int, float)))
            if value is not None:
                sampling[each.name] = value
    return GenerationDefaults(
        eos_token_ids=eos_ids,
        bos_token_id=read("bos_token_id", int),
        pad_token_id=read("pad_token_id", int),
        do_sample=read("do_sample", bool),
        max_new_tokens=read("max_new_tokens", int),
        sampling=sampling,
    )


def _is_misplaced_bool(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, bool) and bool not in kinds
