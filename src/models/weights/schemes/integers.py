"""Matrices of integers in groups: what all layouts of AWQ, GPTQ and compressed-tensors share.

Every one becomes a `QuantizedWeight`, exactly. A layout (see `schemes.layouts`) reads tensors of a
checkpoint into the levels, scales and zero points of a matrix [N, K].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from src import ops
from src.models.weights.levels import OFFSETS, SCALES, VALUES, LevelForm, LevelMethod
from src.models.weights.methods import (
    LinearMethod,
    PackedWeight,
    QuantizedWeight,
    Weight,
    largest_of,
)
from src.models.weights.parameters import Index, Parameter, StoredForm
from src.models.weights.schemes.held import (
    Columns,
    PartSpec,
    at_rows,
    of_shape,
    require_finite,
    require_positive,
    spans,
    staged,
)
from src.models.weights.schemes.rounding import int8_scales, to_int8
from src.models.weights.stacks import ORDER, Stack, group_in, spread
from src.ops.linear import INT4_RUN, SMALLEST_GROUP, dequantize


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
    """A layout as `parameters.RowPacking`."""

    layout: Layout

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
        levels, scales, zeros, groups = self._read(stored)
        parts = {"levels": levels, "scales": scales}
        if zeros is not None:
            parts["offsets"] = zeros * scales
        if "input_scale" in stored:
            parts["input_scale"] = require_positive(of_shape(stored["input_scale"], len(levels)))
        if self.layout.is_reordered:
            inputs = levels.shape[1]
            order = torch.arange(inputs) if groups is None else groups.argsort(stable=True)
            if groups is not None:
                counts = groups.bincount(minlength=scales.shape[1])
                if not (counts == inputs // scales.shape[1]).all():
                    raise ValueError("g_idx has groups of different sizes")
            parts["levels"] = levels[:, order]
            parts["order"] = order.int()
        return parts

    def _read(self, stored: Mapping[str, Tensor]) -> Integers:
        read = self.layout.read(stored)
        require_finite(read.scales)
        return read


class PermutedWeight(NamedTuple):
    """A quantized matrix [N, K] whose columns were sorted by group."""

    values: Tensor  # values, scales and offsets as in `QuantizedWeight`
    scales: Tensor
    offsets: Tensor | None
    order: Tensor  # int32 [K]: sorted column -> input

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in self if part is not None)

    def dequantized(self) -> Tensor:
        """The matrix in float32, [N, K]."""
        sorted_columns = dequantize(self.values, self.scales, self.offsets)
        return torch.empty_like(sorted_columns).index_copy_(1, self.order.long(), sorted_columns)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: [T, K] to [T, N] in x's dtype."""
        gathered = x.index_select(1, self.order)
        return ops.linear(gathered, self.values, self.scales, bias, self.offsets)


class Int8TokenWeight(NamedTuple):
    """A matrix [N, K] of integers whose inputs are rounded to 8 bits, with a scale per token."""

    values: Tensor  # values, scales and offsets as in `QuantizedWeight`
    scales: Tensor
    offsets: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in self if part is not None)

    def dequantized(self) -> Tensor:
        """The matrix in float32, [N, K]."""
        return dequantize(self.values, self.scales, self.offsets)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`round(x) @ weight.T + bias`: [T, K] to [T, N] in x's dtype."""
        input_scales = int8_scales(x)
        return _multiply_rounded(x, input_scales, self.values, self.scales, self.offsets, bias)


class Int8StaticWeight(NamedTuple):
    """A matrix [N, K] of integers whose inputs are rounded with one scale of the checkpoint."""

    values: Tensor  # values, scales and offsets as in `QuantizedWeight`
    scales: Tensor
    offsets: Tensor | None
    input_scale: Tensor  # float32 [1, 1]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in self if part is not None)

    def dequantized(self) -> Tensor:
        """The matrix in float32, [N, K]."""
        return dequantize(self.values, self.scales, self.offsets)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`round(x) @ weight.T + bias`: [T, K] to [T, N] in x's dtype."""
        scale = self.input_scale
        return _multiply_rounded(x, scale, self.values, self.scales, self.offsets, bias)


def _multiply_rounded(
    x: Tensor,
    input_scales: Tensor,
    values: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    levels = to_int8(x, input_scales)
    sums = ops.linear(levels, values, scales, None, offsets).float() * input_scales
    return (sums if bias is None else sums + bias).to(x.dtype)


@dataclass(frozen=True, slots=True)
class IntegerMethod:
    """Holds a matrix of integers in groups; see `methods.LinearMethod`.

    Attributes
    ----------
    groups
        Of a row.
    spans
        Rows of each of the matrices that it is made of, see `held.spans`.
    dtype
        Of the parameter if it has to be decoded after all.
    inputs
        How inputs are rounded.
    """

    bits: int
    is_symmetric: bool
    is_reordered: bool
    groups: int
    spans: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    inputs: str
    name: str = "integers in groups"

    def staging(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """See `LinearMethod`."""
        specs = {
            "levels": PartSpec(torch.int8 if self.is_symmetric else torch.uint8, shape[1]),
            "scales": PartSpec(torch.float32, self.groups),
        }
        if not self.is_symmetric:
            specs["offsets"] = PartSpec(torch.float32, self.groups)
        if self.inputs == "static":
            specs["input_scale"] = PartSpec(torch.float32, 1)
        parts = staged(specs, shape[0], device)
        if self.is_reordered:
            # One row for each of the matrices.
            parts["order"] = torch.zeros(
                (len(self.spans), shape[1]), dtype=torch.int32, device=device
            )
        return parts

    def place(self, part: Tensor, kind: str, index: Index) -> Tensor:
        """See `LinearMethod`."""
        if kind != "order":
            return at_rows(part, index)
        rows = index[0] if index else slice(0, self.spans[0][1])
        assert isinstance(rows, slice)
        return part[[start for start, _ in self.spans].index(rows.start or 0)]

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """See `LinearMethod`."""
        most = 2 ** (self.bits - 1) - 1
        groups = values.float().unflatten(1, (self.groups, -1))
        scales = groups.abs().amax(dim=2, keepdim=True).clamp_min_(1e-9) / most
        levels = (groups / scales).round_().to(torch.int8).flatten(1)
        scales = scales.squeeze(2)
        parts = {"levels": levels, "scales": scales}
        if not self.is_symmetric:
            middle = most + 1
            parts["levels"] = (levels.int() + middle).to(torch.uint8)
            parts["offsets"] = scales * middle
        if self.inputs == "static":
            parts["input_scale"] = torch.full_like(scales[:, :1], 0.05)
        if self.is_reordered:
            inputs = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
            parts["order"] = inputs.repeat(len(self.spans), 1)
        return parts

    def make(self, parts: Mapping[str, Tensor]) -> Weight:
        """See `LinearMethod`. Matrices whose columns have different orders are decoded."""
        weight = QuantizedWeight.grouped(
            parts["levels"], self.bits, parts["scales"], parts.get("offsets")
        )
        if self.inputs != "none":
            return self._with_rounded_inputs(weight, parts)
        if not self.is_reordered:
            return weight
        orders = parts["order"]
        if orders.is_meta or (orders == orders[0]).all():
            return PermutedWeight(*weight, orders[0].contiguous())
        decoded = torch.empty(parts["levels"].shape, dtype=self.dtype, device=orders.device)
        dense = weight.dequantized()
        for (start, stop), order in zip(self.spans, orders.long(), strict=True):
            decoded[start:stop, order] = dense[start:stop].to(self.dtype)
        return decoded

    def _with_rounded_inputs(
        self, weight: QuantizedWeight, parts: Mapping[str, Tensor]
    ) -> PackedWeight:
        if self.inputs == "static":
            return Int8StaticWeight(*weight, largest_of(parts["input_scale"]))
        return Int8TokenWeight(*weight)


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """A matrix of integers in groups; see `checkpoint_formats.Scheme`."""

    packing: IntegerPacking
    inputs: str = "none"

    def method(self, parameter: Parameter, shards: int | None) -> LinearMethod | None:
        """See `checkpoint_formats.Scheme`."""
        layout, (_, inputs) = self.packing.layout, parameter.shape
        columns = layout.columns
        if shards == 1:
            columns.require_shards(inputs)
        groups = columns.count(inputs)
        is_whole = columns.divides(inputs) and inputs % INT4_RUN == 0
        if not is_whole or (inputs // groups) % SMALLEST_GROUP:
            return None
        moved = shards is not None or any(each.transform for each in parameter.placements)
        if layout.is_reordered and moved:
            # The order is of the whole matrix's columns.
            return None
        return IntegerMethod(
            layout.bits,
            layout.is_symmetric,
            layout.is_reordered,
            groups,
            spans(parameter),
            parameter.dtype,
            self.inputs,
        )

    def stack(self, inputs: int, *, is_whole: bool) -> Stack | None:
        """See `checkpoint_formats.Scheme`."""
        layout, columns = self.packing.layout, self.packing.layout.columns
        # One group has no order.
        is_ordered = layout.is_reordered and columns.size is not None
        if is_ordered and not (is_whole and columns.divides(inputs)):
            return None
        group = group_in(columns.size, inputs)
        if group is None:
            return None
        bits = 4 if layout.bits <= 4 and group % INT4_RUN == 0 else 8
        form = LevelForm(group, bits, not layout.is_symmetric)
        return Stack(LevelMethod(form), StackedIntegers(self.packing, form), is_ordered)


@dataclass(frozen=True, slots=True)
class StackedIntegers:
    """A matrix of experts as levels in groups that a weight has."""

    matrix: IntegerPacking
    form: LevelForm

    @property
    def is_of_rows(self) -> bool:
        """See `parameters.RowPacking`."""
        return False

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `parameters.Packing`."""
        return self.matrix.forms(tensor, shape)

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `parameters.Packing`."""
        return self.matrix.unpack(stored)

    def rows(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `parameters.RowPacking`. Columns are sorted by their group."""
        given, layout = self.matrix.rows(stored), self.matrix.layout
        levels, shift = given["levels"], given.get("offsets")
        cut = (layout.columns.size, levels.shape[1], self.form.group)
        weight = QuantizedWeight.grouped(
            levels,
            layout.bits,
            spread(given["scales"], *cut),
            None if shift is None else spread(shift, *cut),
        )
        parts = {VALUES: weight.values, SCALES: weight.scales.reshape(len(levels), -1)}
        if self.form.has_offsets:
            none = torch.zeros_like(parts[SCALES])
            parts[OFFSETS] = none if weight.offsets is None else weight.offsets
        if ORDER in given:
            parts[ORDER] = given[ORDER]
        return parts
