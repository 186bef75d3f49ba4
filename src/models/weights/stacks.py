"""Stacks of matrices, as experts have them, that stay packed as a checkpoint stores them.

A stack [E, N, K] is E matrices of one format. It is staged and packed as one matrix of E * N rows,
so every method whose parts are those of its weight, row by row, can hold it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from src.models.weights.methods import LinearMethod
from src.models.weights.parameters import Index, Parameter, RowPacking
from src.ops.linear import INT4_RUN, SMALLEST_GROUP, STRIP, dequantize


class StackedWeight(NamedTuple):
    """Quantized matrices [E, N, K]; each is one that `ops.linear` multiplies by."""

    values: Tensor  # as in `QuantizedWeight` or `Float8Weight`, of each matrix [E, ...]
    scales: Tensor
    offsets: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in self if part is not None)

    def dequantized(self) -> Tensor:
        """The matrices in float32, [E, N, K]."""
        offsets = [None] * len(self.values) if self.offsets is None else self.offsets
        parts = zip(self.values, self.scales, offsets, strict=True)
        return torch.stack([dequantize(*each) for each in parts])


class Stack(NamedTuple):
    """How the matrices of a stack are held: by which method, and what is packed."""

    method: LinearMethod
    packing: RowPacking


@dataclass(frozen=True, slots=True)
class StackedMethod:
    """Holds a stack by a method of matrices; see `methods.LinearMethod`.

    ``matrix`` keeps its parts as they are staged, so that a stack is never in memory twice. Its
    weights have values, scales and perhaps offsets.
    """

    matrix: LinearMethod

    @property
    def name(self) -> str:
        """See `methods.LinearMethod`."""
        return f"experts of {self.matrix.name}"

    def staging(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """See `methods.LinearMethod`; of a shape [E, N, K]."""
        count, rows, inputs = shape
        parts = self.matrix.staging((count * rows, inputs), dtype, device)
        return {kind: part.unflatten(0, (count, rows)) for kind, part in parts.items()}

    def place(self, part: Tensor, kind: str, index: Index) -> Tensor:
        """See `methods.LinearMethod`."""
        return part[index] if index else part

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """See `methods.LinearMethod`. One matrix after the other, since copies are larger."""
        encoded = [self.matrix.encode(matrix) for matrix in values]
        return {kind: torch.stack([each[kind] for each in encoded]) for kind in encoded[0]}

    def make(self, parts: Mapping[str, Tensor]) -> StackedWeight:
        """See `methods.LinearMethod`."""
        count = len(next(iter(parts.values())))
        weight = self.matrix.make({kind: part.flatten(0, 1) for kind, part in parts.items()})
        tensors: list[Any] = [
            None if one is None else one.unflatten(0, (count, -1)) for one in weight
        ]
        return StackedWeight(*tensors)


def group_in(size: int | None, inputs: int, smallest: int = SMALLEST_GROUP) -> int | None:
    """The largest group of columns that divides both groups of ``size`` and rows of ``inputs``.

    None: there is no group that weights can have, a multiple of ``smallest``. ``size`` None stands
    for whole rows.
    """
    group = inputs if size is None else math.gcd(size, inputs)
    return None if inputs % INT4_RUN or group % smallest else group


def spread(numbers: Tensor, size: int | None, inputs: int, group: int) -> Tensor:
    """Numbers of groups of ``size`` columns, [N, G], for each ``group`` columns of a row.

    ``group`` divides ``size`` and ``inputs``. The last group of ``size`` may be cut short.
    """
    starts = torch.arange(0, inputs, group) // (size or inputs)
    return numbers[:, starts]


def fits_in_strips(parameter: Parameter) -> bool:
    """Whether the matrices of a stack, and gates and ups among them, are whole strips."""
    for placement in parameter.placements:
        rows = placement.index[1] if len(placement.index) > 1 else slice(None)
        assert isinstance(rows, slice)
        if len(range(*rows.indices(parameter.shape[1]))) % STRIP:
            return False
    return True
