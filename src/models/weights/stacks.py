"""Stacks of matrices, as experts have them, that stay packed as a checkpoint stores them.

A stack [E, N, K] is E matrices of one format. It is staged and packed as one matrix of E * N rows,
so every method whose parts are those of its weight, row by row, can hold it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from src.models.weights.methods import LinearMethod
from src.models.weights.parameters import Index, Parameter, RowPacking
from src.ops.linear import INT4_RUN, SMALLEST_GROUP, STRIP, dequantize

ORDER: Final = "order"


class StackedWeight(NamedTuple):
    """Quantized matrices [E, N, K]; each is one that `ops.linear` multiplies by."""

    values: Tensor  # as in `QuantizedWeight` or `Float8Weight`, of each matrix [E, ...]
    scales: Tensor
    offsets: Tensor | None = None
    order: Tensor | None = None  # int32 [E, K]: column of values -> input; None: as they are

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in self if part is not None)

    def dequantized(self) -> Tensor:
        """The matrices in float32, [E, N, K]."""
        offsets = [None] * len(self.values) if self.offsets is None else self.offsets
        parts = zip(self.values, self.scales, offsets, strict=True)
        dense = torch.stack([dequantize(*each) for each in parts])
        if self.order is None:
            return dense
        columns = self.order.long()[:, None].expand_as(dense)
        return torch.empty_like(dense).scatter_(2, columns, dense)


class Stack(NamedTuple):
    """How the matrices of a stack are held: by which method, and what is packed.

    ``is_ordered``: the packing has a part ``order`` too.
    """

    method: LinearMethod
    packing: RowPacking
    is_ordered: bool = False


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


@dataclass(frozen=True, slots=True)
class OrderedStackMethod:
    """Holds a stack whose columns were sorted by group; see `methods.LinearMethod`.

    Attributes
    ----------
    parts
        Of each matrix: parts of equal height, such as gates and ups, that have an order each.
    dtype
        Of the parameter if it has to be decoded, because these orders differ.
    """

    stack: StackedMethod
    parts: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """See `methods.LinearMethod`."""
        return self.stack.name

    def staging(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """See `methods.LinearMethod`; of a shape [E, N, K]."""
        count, _, inputs = shape
        orders = torch.zeros((count, self.parts, inputs), dtype=torch.int32, device=device)
        return self.stack.staging(shape, dtype, device) | {ORDER: orders}

    def place(self, part: Tensor, kind: str, index: Index) -> Tensor:
        """See `methods.LinearMethod`. Of two parts the second does not begin at the first row."""
        if kind != ORDER:
            return self.stack.place(part, kind, index)
        expert, *rows = index
        is_second = bool(rows and isinstance(rows[0], slice) and rows[0].start)
        return part[expert, int(is_second)]

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """See `methods.LinearMethod`."""
        count, _, inputs = values.shape
        order = torch.arange(inputs, dtype=torch.int32, device=values.device)
        return self.stack.encode(values) | {ORDER: order.repeat(count, self.parts, 1)}

    def make(self, parts: Mapping[str, Tensor]) -> Tensor | StackedWeight:
        """See `methods.LinearMethod`."""
        weight = self.stack.make({kind: part for kind, part in parts.items() if kind != ORDER})
        orders = parts[ORDER]
        if orders.is_meta or (orders == orders[:, :1]).all():
            return weight._replace(order=orders[:, 0].contiguous())
        count, _, inputs = orders.shape
        decoded = torch.empty((count, weight.scales.shape[1], inputs), dtype=self.dtype)
        for expert, own in enumerate(orders):
            shift = None if weight.offsets is None else weight.offsets[expert]
            dense = dequantize(weight.values[expert], weight.scales[expert], shift)
            for to, rows, order in zip(
                decoded[expert].chunk(self.parts), dense.chunk(self.parts), own,
                strict=True,
            ):  # fmt: skip
                to[:, order.long()] = rows.to(self.dtype)
        return decoded.to(orders.device)


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
