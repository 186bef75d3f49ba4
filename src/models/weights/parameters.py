"""Descriptions of a model's parameters: shapes, kinds, and their tensors in a checkpoint.

Allocation, loading, quantization, layout and dummy values all read this one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from src.ops.host_memory import lazy_zeros

# matrix: a projection [out, in], which a linear method may hold in another format.
# head: the projection to logits, where errors matter most.
# experts: a stack of matrices [experts, out, in].
# router: chooses or weighs experts; always in float32.
# latent: makes keys and values of latents; its mixer takes it as it is.
# vector: norms, biases and other small parameters.
# embedding: a table whose rows are looked up.
Kind: TypeAlias = Literal["matrix", "head", "experts", "router", "latent", "vector", "embedding"]
Index: TypeAlias = tuple[int | slice, ...]


class Transform(Protocol):
    """A function of a checkpoint's tensor; see `weights.transforms`."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have to fill a part of this shape."""

    def __call__(self, stored: Tensor) -> Tensor:
        """The values for the parameter. ``stored`` has the shape that `stored_shape` gives."""


class Packing(Protocol):
    """A form in which a checkpoint stores values as bytes; see `weights.packing`."""

    @property
    def endings(self) -> tuple[str, ...]:
        """The ends of the names of its tensors, which begin with the placement's name."""

    def stored_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes of these tensors, all of bytes, for values of this shape."""

    def unpack(self, stored: Sequence[Tensor]) -> Tensor:
        """The values that the tensors stand for, in float32."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts along the first dimension of a checkpoint's tensor."""

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one checkpoint tensor, or of a part of it, in a parameter.

    Attributes
    ----------
    tensor
        Its name in the checkpoint.
    index
        The part of the parameter that it fills, a contiguous view. Empty: all of it.
    shard
        The dimension of the checkpoint's tensor that is sharded over the ranks; None: not sharded.
    transform
        Applied to the checkpoint's tensor, or to this rank's part, before it is copied: for example
        a transposition or a permutation of rows. None: the tensor is read directly into place.
    part
        The part of the checkpoint's tensor that is read; ``shard`` and ``transform`` are of this
        part. None: all of it.
    packing
        The form of the values if they are packed. ``shard`` and ``transform`` are of the values.
    """

    tensor: str
    index: Index = ()
    shard: int | None = None
    transform: Transform | None = None
    part: Part | None = None
    packing: Packing | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a model, perhaps fused from several tensors of a checkpoint.

    Attributes
    ----------
    shape
        Of this rank's part, in elements, before quantization.
    fill
        The value of dummy weights; None: random values, scaled for a matrix.
    dtype
        Its dtype if it is not quantized.
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
    """Placements of tensors that are stacked along the rows of one fused parameter.

    With one name the checkpoint has them fused already, in the same order.

    Raises:
        ValueError: the number of names is neither the number of sizes nor one.
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
    """A view of the part of a parameter that a placement fills."""
    return parameter[placement.index] if placement.index else parameter


def stored_shape(view: Tensor, placement: Placement, world_size: int) -> tuple[int, ...]:
    """The shape that the checkpoint's values must have, of one part if there are parts."""
    own, transform = tuple(view.shape), placement.transform
    shape = list(own if transform is None else transform.stored_shape(own))
    if placement.shard is not None:
        shape[placement.shard] *= world_size
    return tuple(shape)


def stored_tensors(
    name: str, view: Tensor, placement: Placement, world_size: int
) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors for a view, from the placement's name: name -> shape."""
    shape, packing = stored_shape(view, placement, world_size), placement.packing
    shapes = {name: shape}
    if packing is not None:
        pairs = zip(packing.endings, packing.stored_shapes(shape), strict=True)
        shapes = {name + ending: each for ending, each in pairs}
    if placement.part is None:
        return shapes
    return {name: (placement.part.count, *each) for name, each in shapes.items()}


def own_part(stored: Tensor, placement: Placement, rank: int, world_size: int) -> Tensor:
    """A view of this rank's part of a checkpoint's values."""
    if placement.shard is None or world_size == 1:
        return stored
    size = stored.shape[placement.shard] // world_size
    return stored.narrow(placement.shard, rank * size, size)


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a parameter; on the CPU in large pages that are not touched yet."""
    if device.type == "cpu":
        return lazy_zeros(tuple(shape), dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=device)
