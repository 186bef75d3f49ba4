"""How a model is told of its tokens' positions, and how many positions it has."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from src.models.generic.passes import current_pass

# A module that numbers positions from the length of a cache has one of these arguments, and takes
# positions too.
_CACHE_LENGTHS = {"cache_length", "past_key_values_length"}
_LENGTHS = ("max_position_embeddings", "max_target_positions", "max_seq_len")
_DEFAULT_POSITIONS = 2048


def takes_positions(body: nn.Module) -> bool:
    """Whether positions can be passed to a model's body.

    Where they cannot, and its position embeddings would count on from the length of a cache, they
    are given to these instead, in each pass.
    """
    if "position_ids" in inspect.signature(body.forward).parameters:
        return True
    for module in body.modules():
        names = set(inspect.signature(module.forward).parameters)
        if "position_ids" in names and names & _CACHE_LENGTHS:
            module.register_forward_pre_hook(_give_positions, with_kwargs=True)
    return False


def _give_positions(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    current, counted = current_pass(), kwargs.get("position_ids")
    if current is None or not isinstance(counted, Tensor):
        return None
    return args, kwargs | {"position_ids": current.positions.view(counted.shape)}


def leave_out_temperature(module: nn.Module) -> None:
    """Switch off a temperature of attention that is counted from the tokens of a pass.

    Below the length that `position_limit` gives, it is 1.
    """
    for part in module.modules():
        if hasattr(part, "attn_temperature_tuning"):
            setattr(part, "attn_temperature_tuning", False)  # noqa: B010 - mypy takes it for a tensor


def position_limit(config: Any) -> tuple[int, str]:
    """The longest sequence in tokens, and what sets that bound.

    RoPE whose frequencies change with the longest position of a pass stays below where they begin
    to: beyond, what a request gets would depend on the requests beside it. So does attention whose
    temperature rises with the length.
    """
    name = next((one for one in _LENGTHS if getattr(config, one, None)), _LENGTHS[0])
    most = getattr(config, name, None) or _DEFAULT_POSITIONS
    limits = [(int(most), name)]
    if getattr(config, "attn_temperature_tuning", False):
        limits.append((int(config.floor_scale) - 1, "floor_scale of attention's temperature"))
    for rope in _ropes(getattr(config, "rope_parameters", None) or {}):
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            name = "original_max_position_embeddings"
            original = rope.get(name) or getattr(config, name, None) or most
            limits.append((int(original), "original_max_position_embeddings of longrope"))
        elif kind == "dynamic":
            limits.append((int(most), "max_position_embeddings of dynamic RoPE"))
    return min(limits, key=lambda limit: limit[0])


def _ropes(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The RoPE variants of a configuration: one, or one for each kind of layers."""
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]
