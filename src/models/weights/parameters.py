"""What a model's parameters are: shapes, where a checkpoint keeps them, and what they are for.

One table per part of a model makes allocation, loading, quantization, layout and dummy values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from src.ops.host_memory import lazy_zeros

# matrix: a projection [out, in], which a linear method may hold in another format.
# head: one whose errors go straight into the logits.
# experts: a stack of matrices [experts, out, in].
# router: chooses experts; always in float32.
# vector: norms, biases and whatever else is small.
# embedding: rows are looked up.
Kind: TypeAlias = Literal["matrix", "head", "experts", "router", "vector", "embedding"]
Index: TypeAlias = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one tensor of a checkpoint goes.

    Attributes
    ----------
    tensor
        Its name in the checkpoint.
    index
        The part of the parameter that it fills: a contiguous view of that. Empty is all of it.
    shard
        Dimension of the checkpoint's tensor that ranks divide among them; None: each has all of it.
    transform
        Of the checkpoint's tensor, or this rank's part of it, before it is copied: transposition, a
        permutation of rows. None: it is read straight into place.
    """

    tensor: str
    index: Index = ()
    shard: int | None = None
    transform: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a model, maybe fused of several tensors of a checkpoint.

    Attributes
    ----------
    shape
        Of this rank's part, in elements, whatever format holds it.
    fill
        The value of dummy weights; None draws them as a matrix needs it.
    dtype
        As long as no linear method holds it in another format.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    placements: tuple[Placement, ...]
    fill: float | None
    dtype: torch.dtype


def rows_of(
    names: Sequence[str], sizes: Sequence[int], *, shard: int | None = 0
) -> tuple[Placement, ...]:
    """Placements of tensors that lie one below the other in one fused parameter.

    With one name the checkpoint has them fused already, in the same order.

    Raises:
        ValueError: as many names as sizes are expected, or one.
    """
    if len(names) == 1:
        return (Placement(names[0], shard=shard),)
    if len(names) != len(sizes):
        raise ValueError(f"{len(names)} tensors for {len(sizes)} parts of a parameter")
    placements, start = [], 0
    for name, size in zip(names, sizes, strict=True):
        placements.append(Placement(name, (slice(start, start + size),), shard))
        start += size
    return tuple(placements)


def view_of(parameter: Tensor, placement: Placement) -> Tensor:
    """The part of a parameter that a placement fills: a view."""
    return parameter[placement.index] if placement.index else parameter


def stored_shape(view: Tensor, placement: Placement, world_size: int) -> tuple[int, ...] | None:
    """The shape that the checkpoint's tensor must have; None where a transform decides."""
    if placement.transform is not None:
        return None
    shape = list(view.shape)
    if placement.shard is not None:
        shape[placement.shard] *= world_size
    return tuple(shape)


def own_part(stored: Tensor, placement: Placement, rank: int, world_size: int) -> Tensor:
    """This rank's part of a checkpoint's tensor: a view."""
    if placement.shard is None or world_size == 1:
        return stored
    size = stored.shape[placement.shard] // world_size
    return stored.narrow(placement.shard, rank * size, size)


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for a parameter; on the CPU in large pages that nobody has touched yet."""
    if device.type == "cpu":
        return lazy_zeros(tuple(shape), dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=device)
