"""Transforms of a checkpoint's tensors on their way into parameters; see `parameters.Placement`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from src.models.weights.parameters import Transform


@dataclass(frozen=True, slots=True)
class InHalves:
    """Reorders the rows of heads whose neighbours are rotated together.

    Some families rotate pairs (2 i, 2 i + 1) of a head. The layers here rotate pairs
    (i, i + rotary_dim / 2). Queries and keys whose rows are reordered alike have the same products,
    so rows of weights, of biases and of norms are reordered once, at load.

    Attributes
    ----------
    head_dim
        Rows of one head.
    rotary_dim
        Rows of a head that are rotated.
    start
        The first rotated row of a head. Rows before and behind the rotated ones stay.
    heads
        How many heads are reordered, from the first; None is all. Later rows (values that are fused
        with queries and keys) stay.
    dim
        The dimension of rows.
    """

    head_dim: int
    rotary_dim: int
    start: int = 0
    heads: int | None = None
    dim: int = 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See `parameters.Transform`."""
        return shape

    def __call__(self, stored: Tensor) -> Tensor:
        """Reorder the rows of ``stored``: [heads * head_dim, ...], if ``dim`` is 0."""
        before, rotated, behind = torch.arange(self.head_dim).split(
            (self.start, self.rotary_dim, self.head_dim - self.start - self.rotary_dim)
        )
        order = torch.cat([before, rotated[0::2], rotated[1::2], behind])
        rows = stored.unflatten(self.dim, (-1, self.head_dim))
        count = rows.shape[self.dim] if self.heads is None else self.heads
        ordered = rows.narrow(self.dim, 0, count).index_select(self.dim + 1, order)
        rest = rows.narrow(self.dim, count, rows.shape[self.dim] - count)
        return torch.cat([ordered, rest], self.dim).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True, slots=True)
class InTurn:
    """Applies one transform after another."""

    transforms: tuple[Transform, ...]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See `parameters.Transform`."""
        for transform in reversed(self.transforms):
            shape = transform.stored_shape(shape)
        return shape

    def __call__(self, stored: Tensor) -> Tensor:
        """Apply the transforms, from the first on."""
        for transform in self.transforms:
            stored = transform(stored)
        return stored


@dataclass(frozen=True, slots=True)
class Transposed:
    """Exchanges the last two dimensions: of matrices that a checkpoint stores as [..., in, out]."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See `parameters.Transform`."""
        return (*shape[:-2], shape[-1], shape[-2])

    def __call__(self, stored: Tensor) -> Tensor:
        """Exchange the last two dimensions of ``stored``."""
        return stored.transpose(-1, -2)


@dataclass(frozen=True, slots=True)
class ByHead:
    """Cuts the rows of a matrix [heads * rows, in] into heads: [heads, rows, in]."""

    rows: int

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See `parameters.Transform`."""
        return (shape[0] * shape[1], *shape[2:])

    def __call__(self, stored: Tensor) -> Tensor:
        """Cut the rows of ``stored``."""
        cut: Tensor = stored.unflatten(0, (-1, self.rows))
        return cut


@dataclass(frozen=True, slots=True)
class PartByPart:
    """Reorders rows that a checkpoint has head by head: first all heads' first part, and so on.

    ``sizes`` are the rows of each part of one head.
    """

    heads: int
    sizes: tuple[int, ...]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See `parameters.Transform`."""
        return shape

    def __call__(self, stored: Tensor) -> Tensor:
        """Reorder the rows of ``stored``: [heads * sum of sizes, ...]."""
        rows = stored.unflatten(0, (self.heads, sum(self.sizes)))
        return torch.cat([part.flatten(0, 1) for part in rows.split(self.sizes, dim=1)])


@dataclass(frozen=True, slots=True)
class Taps:
    """The weight of a convolution of channels by themselves, [C, 1, K], as [K, C]."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See `parameters.Transform`."""
        return (shape[1], 1, shape[0])

    def __call__(self, stored: Tensor) -> Tensor:
        """Turn ``stored`` [C, 1, K] round."""
        return stored[:, 0].T
