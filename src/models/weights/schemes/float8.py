"""Matrices of 8-bit floating point numbers (e4m3), with scales per tensor, row or block.

The first description is "FP8 Formats for Deep Learning" (2022). Scales multiply:
``weight = value * scale``, although some checkpoints call them ``weight_scale_inv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from src.models.weights.methods import INPUT_SCALE, SCALES, VALUES, RoundedInputs, Stored
from src.models.weights.parameters import NUMBERS, Method, Parameter, RowPacking, StoredForm
from src.models.weights.schemes.columns import (
    Columns,
    group_in,
    of_shape,
    require_finite,
    require_positive,
    spread,
)
from src.ops.matrix import FLOAT8, Encoding


@dataclass(frozen=True, slots=True)
class Float8Packing:
    """How a checkpoint stores such a matrix.

    Attributes
    ----------
    block
        Rows and columns that share a scale; None: a scale for all, or one per row.
    is_static
        Whether there is a scale of the inputs.
    group
        Columns that share a scale in the matrix that holds it; they divide those of a block.
    """

    block: tuple[int, int] | None
    is_static: bool
    group: int | None = None

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
        values, scales = stored["values"], self._scales(stored)
        if self.block is not None and self.group is not None:
            scales = spread(scales, self.block[1], values.shape[1], self.group)
        parts = {VALUES: values.view(torch.uint8), SCALES: scales}
        if self.is_static:
            given = _one_of(stored, "input_scale", "activation_scale", "input_scale")
            parts[INPUT_SCALE] = require_positive(of_shape(given, len(values)))
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


def _one_of(stored: Mapping[str, Tensor], first: str, second: str, name: str) -> Tensor:
    found = [stored[role] for role in (first, second) if role in stored]
    if len(found) != 1:
        raise ValueError(f"expected one {name}, found {len(found)}")
    return found[0]


@dataclass(frozen=True, slots=True)
class Float8Scheme:
    """A matrix of 8-bit floating point numbers; see `checkpoint_formats.Scheme`."""

    packing: Float8Packing
    inputs: RoundedInputs | None

    def hold(self, parameter: Parameter, shards: int | None) -> tuple[RowPacking, Method] | None:
        """See `checkpoint_formats.Scheme`."""
        inputs, block = parameter.shape[-1], self.packing.block
        group = group_in(None if block is None else block[1], inputs)
        is_stack = parameter.kind == "experts"
        if block is not None and not is_stack:
            columns = Columns(block[1])
            if shards == 1:
                columns.require_shards(inputs)
            if not columns.divides(inputs):
                return None
            group = block[1]
        if group is None and is_stack:
            return None
        encoding = Encoding("e4m3", None if block is None else group, torch.float32)
        packing = replace(self.packing, group=group)
        if is_stack:
            return packing, Stored("experts of fp8", encoding)
        return packing, Stored("fp8", encoding, inputs=self.inputs)
