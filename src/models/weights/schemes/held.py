"""What the linear methods of schemes have in common: staging of parts, and their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from src.models.weights.parameters import Index, Parameter, allocate_unset


class PartSpec(NamedTuple):
    """One part of a matrix [N, K] in rows: its dtype, and how many columns it has."""

    dtype: torch.dtype
    columns: int


@dataclass(frozen=True, slots=True)
class Columns:
    """The groups of a matrix's columns that share a scale.

    ``size`` None: a whole row is one group.
    """

    size: int | None

    def count(self, inputs: int) -> int:
        """How many groups a row of so many columns has; the last may be cut short."""
        return 1 if self.size is None else -(-inputs // self.size)

    def divides(self, inputs: int) -> bool:
        """Whether groups are whole."""
        return self.size is None or inputs % self.size == 0

    def require_shards(self, inputs: int) -> None:
        """Refuse a rank's part of rows that is not made of whole groups.

        Raises:
            ValueError: it is not.
        """
        if not self.divides(inputs):
            raise ValueError(
                f"ranks have {inputs} inputs each, which groups of {self.size} do not divide"
            )


def staged(specs: dict[str, PartSpec], rows: int, device: torch.device) -> dict[str, Tensor]:
    """Room for the parts of a matrix of so many rows."""
    return {
        name: allocate_unset((rows, spec.columns), spec.dtype, device)
        for name, spec in specs.items()
    }


def at_rows(part: Tensor, index: Index) -> Tensor:
    """The rows of a part at a placement's index."""
    return part[index] if index else part


def spans(parameter: Parameter) -> tuple[tuple[int, int], ...]:
    """The rows of a parameter that each of its placements fills, as (start, stop)."""
    found = []
    for placement in parameter.placements:
        rows = placement.index[0] if placement.index else slice(None)
        assert isinstance(rows, slice)
        start, stop, _ = rows.indices(parameter.shape[0])
        found.append((start, stop))
    return tuple(found)


def of_shape(tensor: Tensor, rows: int) -> Tensor:
    """Scales of a checkpoint, a number or one per row, as float32 [rows, 1]."""
    return tensor.float().reshape(-1, 1).expand(rows, 1)


def require_finite(scales: Tensor) -> Tensor:
    """The same scales of a matrix. Zero is one, of a group of zeros, and so is a negative number.

    Raises:
        ValueError: one is infinite or not a number.
    """
    if not scales.isfinite().all():
        raise ValueError("its scales must be finite numbers")
    return scales


def require_positive(scale: Tensor) -> Tensor:
    """The same scale of inputs, which are divided by it.

    Raises:
        ValueError: it is not a positive finite number.
    """
    if not (scale.isfinite() & (scale > 0)).all():
        raise ValueError("the scale of its inputs must be a positive number")
    return scale
