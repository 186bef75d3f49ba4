"""Weights with adapters beside them, and the variant of a program whose segments use them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from src import ops
from src.models.layers.linear import linear
from src.models.program import ADAPTER_SLOTS, Mixer, Segment
from src.models.weights.parameters import Weight

# Names of an adapted parameter's tensors are the parameter's name and these.
DOWN, UP, RANKS, STARTS = ".lora_down", ".lora_up", ".lora_ranks", ".lora_starts"


class ChosenWeight(NamedTuple):
    """A weight with the slot of each token, in a segment that is being computed."""

    base: Weight
    down: Tensor
    up: Tensor
    ranks: Tensor
    starts: Tensor
    slots: Tensor  # int64 [T]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The base's result and the update of each token's slot: [T, K] to [T, N] in x's dtype."""
        base = linear(x, self.base, bias)
        return ops.lora(base, x, self.down, self.up, self.ranks, self.starts, self.slots)


class AdaptedWeight(NamedTuple):
    """A weight of any format, with the adapters of every slot; see `ops.lora`."""

    base: Weight
    down: Tensor  # [S, P * R, K]
    up: Tensor  # [S, R, N]
    ranks: Tensor  # int32 [S, P]
    starts: Tensor  # int32 [P + 1]

    def choose(self, slots: Tensor) -> ChosenWeight:
        """The weight for tokens with these slots."""
        return ChosenWeight(*self, slots)


def adapted_segments(
    segments: Sequence[Segment | Mixer], names: Collection[str]
) -> list[Segment | Mixer]:
    """The same segments, where parameters of these names have adapters beside them.

    A segment with one of them reads `ADAPTER_SLOTS` behind everything else.
    """
    return [
        replace(step, weights=weights, reads=(*step.reads, ADAPTER_SLOTS), chooses=True)
        if isinstance(step, Segment) and (weights := _adapted(step.weights, names)) != step.weights
        else step
        for step in segments
    ]


def _adapted(weights: Any, names: Collection[str]) -> Any:
    """Nested tuples of names, with an `AdaptedWeight` of names in each adapted one's place."""
    if isinstance(weights, str):
        if weights not in names:
            return weights
        own: Any = [weights, *(weights + ending for ending in (DOWN, UP, RANKS, STARTS))]
        return AdaptedWeight(*own)
    if not isinstance(weights, tuple):
        return weights
    items = [_adapted(item, names) for item in weights]
    return type(weights)(*items) if hasattr(weights, "_fields") else tuple(items)
