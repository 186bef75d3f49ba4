"""Matrices of 8-bit floating point numbers (e4m3), with scales per tensor, row or block.

The first description is "FP8 Formats for Deep Learning" (2022). Scales multiply:
``weight = value * scale``, although some checkpoints call them ``weight_scale_inv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from src import ops
from src.models.weights.methods import LinearMethod, PackedWeight, largest_of
from src.models.weights.parameters import NUMBERS, Index, Parameter, StoredForm
from src.models.weights.schemes.held import (
    Columns,
    PartSpec,
    at_rows,
    of_shape,
    require_finite,
    require_positive,
    staged,
)
from src.models.weights.schemes.rounding import (
    float8_scales,
    rounded_in_blocks,
    to_float8,
)
from src.models.weights.stacks import Stack, group_in, spread
from src.ops.linear import FLOAT8, dequantize

# How inputs are rounded: not at all, by token, by block of a token, or with the checkpoint's scale.
Inputs: TypeAlias = Literal["none", "token", "block", "static"]


# Of devices for which cuBLAS has products with scales per row.
_ROWWISE_CAPABILITY = (9, 0)


class Float8Weight(NamedTuple):
    """A matrix [N, K]. Inputs are not rounded."""

    values: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32 [N], or [N, G] of groups of K / G inputs

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in self if part is not None)

    def dequantized(self) -> Tensor:
        """The matrix in float32, [N, K]."""
        return dequantize(self.values, self.scales)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: [T, K] to [T, N] in x's dtype."""
        return ops.linear(x, self.values, self.scales, bias)


class Float8BlockWeight(NamedTuple):
    """A matrix [N, K] whose inputs are rounded with a scale per block of a token."""

    values: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32 [N, G]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in self if part is not None)

    def dequantized(self) -> Tensor:
        """The matrix in float32, [N, K]."""
        return dequantize(self.values, self.scales)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`round(x) @ weight.T + bias`: [T, K] to [T, N] in x's dtype."""
        block = x.shape[-1] // self.scales.shape[1]
        return ops.linear(rounded_in_blocks(x, block), self.values, self.scales, bias)


class Float8TokenWeight(NamedTuple):
    """A matrix [N, K] whose inputs are rounded with a scale per token."""

    values: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32 [N]
    bound: Tensor | None = None  # float32 [1]: the most that counts as an input's magnitude

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in self if part is not None)

    def dequantized(self) -> Tensor:
        """The matrix in float32, [N, K]."""
        return dequantize(self.values, self.scales)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`round(x) @ weight.T + bias`: [T, K] to [T, N] in x's dtype."""
        scales = float8_scales(x, self.bound)
        return _multiply_rounded(x, scales, self.values, self.scales, bias)


class Float8StaticWeight(NamedTuple):
    """A matrix [N, K] whose inputs are rounded with one scale of the checkpoint."""

    values: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32 [N]
    input_scale: Tensor  # float32 [1, 1]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in self if part is not None)

    def dequantized(self) -> Tensor:
        """The matrix in float32, [N, K]."""
        return dequantize(self.values, self.scales)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`round(x) @ weight.T + bias`: [T, K] to [T, N] in x's dtype."""
        scales = self.input_scale.expand(x.shape[0], 1)
        return _multiply_rounded(x, scales, self.values, self.scales, bias)


def _multiply_rounded(
    x: Tensor, input_scales: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Products of rounded inputs, of which each token [T, 1] has one scale."""
    rounded = to_float8(x, input_scales)
    if _multiplies_float8(x, values):
        return ops.float8_product(rounded, values, input_scales, scales, bias, x.dtype)
    sums = ops.linear(rounded.to(x.dtype), values, scales).float() * input_scales
    return (sums if bias is None else sums + bias).to(x.dtype)


def _multiplies_float8(x: Tensor, values: Tensor) -> bool:
    """Whether the device multiplies these numbers by itself, with scales per row."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16:
        return False
    if any(size % 16 for size in values.shape):
        return False
    return torch.cuda.get_device_capability(x.device) >= _ROWWISE_CAPABILITY


@dataclass(frozen=True, slots=True)
class Float8Packing:
    """How a checkpoint stores such a matrix.

    Attributes
    ----------
    block
        Rows and columns that share a scale; None: a scale for all, or one per row.
    is_static
        Whether there is a scale of the inputs.
    """

    block: tuple[int, int] | None
    is_static: bool

    @property
    def is_of_rows(self) -> bool:
        """See `parameters.RowPacking`."""
        return False

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `parameters.Packing`. A scale has one of two names."""
        rows, inputs = shape
        module = tensor.removesuffix("weight")
        one: tuple[tuple[int, ...], ...] = ((), (1,))
        if self.block is None:
            shapes: tuple[tuple[int, ...], ...] = (*one, (1, 1), (rows,), (rows, 1))
        else:
            shapes = ((-(-rows // self.block[0]), -(-inputs // self.block[1])),)
        return {
            "values": StoredForm(tensor, (shape,), (FLOAT8,)),
            "scales": StoredForm(f"{module}weight_scale", shapes, NUMBERS, True),
            "scales_inv": StoredForm(f"{module}weight_scale_inv", shapes, NUMBERS, True),
            "input_scale": StoredForm(f"{module}input_scale", one, NUMBERS, True),
            "activation_scale": StoredForm(f"{module}activation_scale", one, NUMBERS, True),
        }

    def rows(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `parameters.RowPacking`."""
        values = stored["values"]
        # As bytes: rows of these are reordered, for which torch has no code of 8-bit floats.
        parts = {"values": values.view(torch.uint8), "scales": self._scales(stored)}
        if self.is_static:
            given = _one_of(stored, "input_scale", "activation_scale", "input_scale")
            parts["input_scale"] = require_positive(of_shape(given, len(values)))
        return parts

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `parameters.Packing`."""
        values, scales = stored["values"].float(), self._scales(stored)
        if self.block is not None:
            scales = scales.repeat_interleave(self.block[1], dim=1)[:, : values.shape[1]]
        return values.mul_(scales)

    def _scales(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The scales of each row, float32 [N, 1] or [N, G]."""
        rows = len(stored["values"])
        scales = require_finite(_one_of(stored, "scales", "scales_inv", "weight_scale").float())
        if self.block is None:
            return of_shape(scales, rows)
        return scales.repeat_interleave(self.block[0], dim=0)[:rows]


@dataclass(frozen=True, slots=True)
class StackedFloat8:
    """A matrix of experts whose scales are of groups of so many columns."""

    matrix: Float8Packing
    group: int

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
        """See `parameters.RowPacking`."""
        parts = self.matrix.rows(stored)
        values, scales, block = parts["values"], parts["scales"], self.matrix.block
        if block is not None:
            scales = spread(scales, block[1], values.shape[1], self.group)
        return {"values": values, "scales": scales}


def _one_of(stored: Mapping[str, Tensor], first: str, second: str, name: str) -> Tensor:
    found = [stored[role] for role in (first, second) if role in stored]
    if len(found) != 1:
        raise ValueError(f"expected one {name}, found {len(found)}")
    return found[0]


@dataclass(frozen=True, slots=True)
class Float8Method:
    """Holds a matrix of 8-bit floating point numbers; see `methods.LinearMethod`."""

    inputs: Inputs
    groups: int | None
    bound: float | None
    name: str = "fp8"

    def staging(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """See `LinearMethod`."""
        specs = {
            "values": PartSpec(torch.uint8, shape[1]),
            "scales": PartSpec(torch.float32, self.groups or 1),
        }
        if self.inputs == "static":
            specs["input_scale"] = PartSpec(torch.float32, 1)
        return staged(specs, shape[0], device)

    def place(self, part: Tensor, kind: str, index: Index) -> Tensor:
        """See `LinearMethod`."""
        return at_rows(part, index)

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """See `LinearMethod`."""
        groups = values.float().unflatten(1, (self.groups or 1, -1))
        scales = float8_scales(groups)
        parts = {
            "values": to_float8(groups, scales).flatten(1).view(torch.uint8),
            "scales": scales.squeeze(2),
        }
        if self.inputs == "static":
            parts["input_scale"] = torch.full_like(parts["scales"][:, :1], 0.05)
        return parts

    def make(self, parts: Mapping[str, Tensor]) -> PackedWeight:
        """See `LinearMethod`. Inputs that several matrices share have the largest scale of them."""
        values = parts["values"].view(FLOAT8)
        scales = parts["scales"] if self.groups else parts["scales"].squeeze(1)
        if self.inputs == "static":
            largest = largest_of(parts["input_scale"])
            return Float8StaticWeight(values, scales, largest)
        if self.inputs == "block":
            return Float8BlockWeight(values, scales)
        if self.inputs == "token":
            bound = None if self.bound is None else scales.new_full((1,), self.bound)
            return Float8TokenWeight(values, scales, bound)
        return Float8Weight(values, scales)


@dataclass(frozen=True, slots=True)
class Float8Scheme:
    """A matrix of 8-bit floating point numbers; see `checkpoint_formats.Scheme`.

    ``bound`` is the most that counts as the magnitude of an input that is rounded.
    """

    packing: Float8Packing
    inputs: Inputs
    bound: float | None = None

    def method(self, parameter: Parameter, shards: int | None) -> LinearMethod | None:
        """See `checkpoint_formats.Scheme`."""
        inputs, block = parameter.shape[1], self.packing.block
        if block is None:
            return Float8Method(self.inputs, None, self.bound)
        columns = Columns(block[1])
        if shards == 1:
            columns.require_shards(inputs)
        if not columns.divides(inputs):
            return None
        return Float8Method(self.inputs, columns.count(inputs), self.bound)

    def stack(self, inputs: int, *, is_whole: bool) -> Stack | None:
        """See `checkpoint_formats.Scheme`."""
        block = self.packing.block
        group = group_in(None if block is None else block[1], inputs)
        if group is None:
            return None
        groups = None if block is None else inputs // group
        return Stack(Float8Method("none", groups, None), StackedFloat8(self.packing, group))
