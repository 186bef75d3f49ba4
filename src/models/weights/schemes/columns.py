"""What schemes have in common: groups of columns, and the scales of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from src.models.weights.parameters import Parameter
from src.ops.matrix import INT4_RUN, SMALLEST_GROUP


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

        Raises
        ------
        ValueError
            It is not.
        """
        if not self.divides(inputs):
            raise ValueError(
                f"ranks have {inputs} inputs each, which groups of {self.size} do not divide"
            )


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


def starts_of(parameter: Parameter) -> tuple[int, ...]:
    """The first rows that placements fill of a matrix, or of each matrix of a stack, ascending."""
    found = []
    for placement in parameter.placements:
        rows = placement.index[-1] if placement.index else slice(None)
        found.append(rows.start or 0 if isinstance(rows, slice) else 0)
    return tuple(sorted(set(found)))


def of_shape(tensor: Tensor, rows: int) -> Tensor:
    """Scales of a checkpoint, a number or one per row, as float32 [rows, 1]."""
    return tensor.float().reshape(-1, 1).expand(rows, 1)


def require_finite(scales: Tensor) -> Tensor:
    """Return the scales. Zero and negative scales are valid.

    Raises
    ------
    ValueError
        One is infinite or not a number.
    """
    if not scales.isfinite().all():
        raise ValueError("its scales must be finite numbers")
    return scales


def require_positive(scale: Tensor) -> Tensor:
    """The same scale of inputs, which are divided by it.

    Raises
    ------
    ValueError
        It is not a positive finite number.
    """
    if not (scale.isfinite() & (scale > 0)).all():
        raise ValueError("the scale of its inputs must be a positive number")
    return scale
