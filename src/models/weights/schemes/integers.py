"""Matrices of integers in groups: what all layouts of AWQ, GPTQ and compressed-tensors share.

Every one becomes a `Matrix` of levels, exactly. A layout (see `schemes.layouts`) reads tensors of a
checkpoint into the levels, scales and zero points of a matrix [N, K].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from src.models.weights.methods import (
    INPUT_SCALE,
    OFFSETS,
    ORDER,
    SCALES,
    VALUES,
    RoundedInputs,
    Stored,
)
from src.models.weights.parameters import Method, Parameter, RowPacking, StoredForm
from src.models.weights.schemes.columns import (
    Columns,
    group_in,
    of_shape,
    require_finite,
    require_positive,
    spread,
    starts_of,
)
from src.ops.matrix import INT4_RUN, Encoding, of_levels


class Integers(NamedTuple):
    """A matrix [N, K]: ``(level - zero) * scale``."""

    levels: Tensor  # uint8 [N, K] unsigned, or int8 if signed
    scales: Tensor  # float32 [N, G]
    zeros: Tensor | None  # float32 [N, G], None if symmetric
    groups: Tensor | None = None  # int64 [K]: the group of each column; None: in order


class Layout(Protocol):
    """The tensors of one format."""

    @property
    def bits(self) -> int:
        """Of a level."""

    @property
    def columns(self) -> Columns:
        """Columns that share a scale."""

    @property
    def is_symmetric(self) -> bool:
        """Whether levels are signed, and there are no zero points."""

    @property
    def is_reordered(self) -> bool:
        """Whether the checkpoint says of each column which group it belongs to."""

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `parameters.Packing`."""

    def read(self, stored: Mapping[str, Tensor]) -> Integers:
        """The matrix that tensors stand for."""


@dataclass(frozen=True, slots=True)
class IntegerPacking:
    """A layout as `parameters.RowPacking`.

    Attributes
    ----------
    encoding
        Of the matrix that holds it; its groups divide those of the layout. None: it is decoded.
    """

    layout: Layout
    encoding: Encoding | None = None

    @property
    def is_of_rows(self) -> bool:
        """See `parameters.RowPacking`."""
        return False

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `parameters.Packing`."""
        return self.layout.forms(tensor, shape)

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `parameters.Packing`."""
        levels, scales, zeros, groups = self._read(stored)
        if groups is None:
            size = self.layout.columns.size or levels.shape[1]
            groups = torch.arange(levels.shape[1]) // size
        values = levels.float()
        if zeros is not None:
            values -= zeros[:, groups]
        return values.mul_(scales[:, groups])

    def rows(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `parameters.RowPacking`. Columns are sorted by their group."""
        assert self.encoding is not None
        levels, scales, zeros, groups = self._read(stored)
        rows, inputs = levels.shape
        parts = {}
        if "input_scale" in stored:
            parts[INPUT_SCALE] = require_positive(of_shape(stored["input_scale"], rows))
        if self.layout.is_reordered:
            order = torch.arange(inputs) if groups is None else groups.argsort(stable=True)
            if groups is not None:
                counts = groups.bincount(minlength=scales.shape[1])
                if not (counts == inputs // scales.shape[1]).all():
                    raise ValueError("g_idx has groups of different sizes")
            levels = levels[:, order]
            parts[ORDER] = order.int()
        cut = (self.layout.columns.size, inputs, self.encoding.group or inputs)
        matrix = of_levels(
            levels,
            self.layout.bits,
            spread(scales, *cut),
            None if zeros is None else spread(zeros * scales, *cut),
        )
        assert matrix.scales is not None
        parts |= {VALUES: matrix.values, SCALES: matrix.scales.reshape(rows, -1)}
        if self.encoding.has_offsets:
            none = torch.zeros_like(parts[SCALES])
            parts[OFFSETS] = none if matrix.offsets is None else matrix.offsets
        return parts

    def _read(self, stored: Mapping[str, Tensor]) -> Integers:
        read = self.layout.read(stored)
        require_finite(read.scales)
        return read


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """A matrix of integers in groups; see `checkpoint_formats.Scheme`."""

    packing: IntegerPacking
    inputs: RoundedInputs | None = None

    def hold(self, parameter: Parameter, shards: int | None) -> tuple[RowPacking, Method] | None:
        """See `checkpoint_formats.Scheme`. Experts may have parts of a checkpoint's groups."""
        layout, inputs = self.packing.layout, parameter.shape[-1]
        columns, is_stack = layout.columns, parameter.kind == "experts"
        # One group has no order, but the checkpoint of a matrix says one nevertheless.
        is_ordered = layout.is_reordered and not (is_stack and columns.size is None)
        if shards == 1 and not is_stack:
            columns.require_shards(inputs)
        group = group_in(columns.size, inputs)
        is_whole = columns.divides(inputs)
        if group is None or not (is_whole or (is_stack and not is_ordered)):
            return None
        moved = shards is not None or (
            not is_stack and any(each.transform for each in parameter.placements)
        )
        if is_ordered and moved:
            # The order is of the whole matrix's columns.
            return None
        number = "int4" if layout.bits <= 4 and group % INT4_RUN == 0 else "int8"
        encoding = Encoding(number, group, torch.float32, not layout.is_symmetric)
        method = Stored(
            "experts of integers in groups" if is_stack else "integers in groups",
            encoding,
            parameter.dtype,
            None if is_stack else self.inputs,
            starts_of(parameter) if is_ordered else (),
            drops_offsets=not is_stack,
        )
        return replace(self.packing, encoding=encoding), method
