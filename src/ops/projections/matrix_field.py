"""A matrix, or a stack of matrices, as a nested field of an op's record."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from src.ops.matrix import Matrix


class MatrixField:
    """How a `Matrix` is flattened; see `records.NestedField`.

    Parameters
    ----------
    name
        Flat argument with the matrix's values.
    dims
        Its dimensions, as those of a tensor: outputs and inputs, and before them how many matrices
        a stack has.
    prefix
        Before the names of the other flat arguments: `scales`, `offsets`, `order` and `kind`.
    is_ordered
        Whether the op takes a matrix whose columns are in another order than its inputs.
    """

    def __init__(self, name: str, dims: str, *, prefix: str, is_ordered: bool) -> None:
        self.name: Final = name
        self.dims: Final = tuple(dims.split())
        self.scales: Final = f"{prefix}scales"
        self.offsets: Final = f"{prefix}offsets"
        self.order: Final = f"{prefix}order" if is_ordered else None
        self.kind: Final = f"{prefix}kind"
        self.group: Final = f"{prefix}group"
        """What structs call the number of inputs that share a scale; 0: those of a row do."""
        self.group_dtype: Final = f"{prefix}group_dtype"
        """What structs call the dtype of scales and offsets of groups."""
        ordered = () if self.order is None else ((self.order, "Tensor?"),)
        self.PARTS: Final[tuple[tuple[str, str], ...]] = (
            (name, "Tensor"),
            (self.scales, "Tensor?"),
            (self.offsets, "Tensor?"),
            *ordered,
            (self.kind, "int"),
        )

    def parts(self, matrix: Matrix) -> tuple[Tensor | int | None, ...]:
        """The flat arguments.

        Raises
        ------
        ValueError
            Columns have an order, and the op takes none.
        """
        if self.order is not None:
            return matrix.values, matrix.scales, matrix.offsets, matrix.order, matrix.kind
        if matrix.order is not None:
            raise ValueError(f"{self.name} must have its columns in the order of inputs")
        return matrix.values, matrix.scales, matrix.offsets, matrix.kind

    def of(
        self, values: Tensor, scales: Tensor | None, offsets: Tensor | None, *rest: Any
    ) -> Matrix:
        """The matrix of flat arguments."""
        *order, kind = rest
        matrix = Matrix.of_kind(kind, values, scales, offsets)
        return matrix._replace(order=order[0]) if order else matrix
