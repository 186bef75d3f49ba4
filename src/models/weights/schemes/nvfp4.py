"""Matrices of NVFP4: numbers of e2m1 in groups of 16, scales of e4m3, and one factor per matrix.

NVIDIA's "Pretraining Large Language Models with NVFP4" (2025), section 2. A byte holds two numbers,
the first one in the low half. compressed-tensors *divides* scales by a matrix's factor, ModelOpt
*multiplies* them with it. Every matrix of a fused parameter keeps its own factor.

Twice such a number is a whole one. So matrices are held as levels of 8 bits in groups of 16, whose
scales are half of the checkpoint's in float32: exactly, in 10 bits a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from src.models.weights.methods import SCALES, VALUES, Stored
from src.models.weights.parameters import Method, Parameter, RowPacking, StoredForm
from src.models.weights.schemes.columns import Columns, group_in, require_finite
from src.ops.matrix import E2M1, FLOAT8, Encoding

GROUP: Final = 16
"""Inputs that share a scale."""

_NUMBERS: Final = torch.tensor(E2M1)
_LEVELS: Final = (2 * _NUMBERS).to(torch.int8)
_FACTORS: Final = (torch.float32,)
_ONE: Final[tuple[tuple[int, ...], ...]] = ((), (1,))


@dataclass(frozen=True, slots=True)
class Nvfp4Names:
    """Where a tool stores a matrix: what follows the module's name."""

    values: str
    factor: str
    divides: bool
    input_scale: str


COMPRESSED_TENSORS: Final = Nvfp4Names(
    "weight_packed", "weight_global_scale", True, "input_global_scale"
)
MODELOPT: Final = Nvfp4Names("weight", "weight_scale_2", False, "input_scale")


@dataclass(frozen=True, slots=True)
class Nvfp4Packing:
    """A matrix as a tool stores it; see `parameters.RowPacking`.

    A scale of inputs may be there, and says nothing: they are not rounded.
    """

    names: Nvfp4Names

    @property
    def is_of_rows(self) -> bool:
        """See `parameters.RowPacking`."""
        return False

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `parameters.Packing`."""
        rows, inputs = shape
        if inputs % GROUP:
            raise ValueError(f"rows of {inputs} values cannot be cut into groups of {GROUP}")
        module, names = tensor.removesuffix("weight"), self.names
        return {
            "values": StoredForm(f"{module}{names.values}", ((rows, inputs // 2),), (torch.uint8,)),
            "scales": StoredForm(f"{module}weight_scale", ((rows, inputs // GROUP),), (FLOAT8,)),
            "factor": StoredForm(f"{module}{names.factor}", _ONE, _FACTORS),
            "input_scale": StoredForm(f"{module}{names.input_scale}", _ONE, _FACTORS, True),
        }

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `parameters.Packing`."""
        groups: Tensor = _numbers(stored["values"], _NUMBERS).unflatten(1, (-1, GROUP))
        return groups.mul_(self._scales(stored)[:, :, None]).flatten(1)

    def rows(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `parameters.RowPacking`."""
        levels = _numbers(stored["values"], _LEVELS)
        return {VALUES: levels, SCALES: self._scales(stored) / 2}

    def _scales(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The scales of groups, float32 [N, G]."""
        factor = stored["factor"].reshape(1, 1)
        if not (factor.isfinite() & (factor > 0)).all():
            raise ValueError("the factor of its scales must be a positive number")
        scales = stored["scales"].float()
        return require_finite(scales / factor if self.names.divides else scales * factor)


def _numbers(values: Tensor, numbers: Tensor) -> Tensor:
    """The numbers [N, K] of bytes [N, K / 2], of a table of 16."""
    codes = torch.arange(256)
    # Two at once: a whole matrix of indices has four times as many bytes as the checkpoint's.
    pairs = torch.stack((numbers[codes & 15], numbers[codes >> 4]), dim=1)
    return pairs[values.int()].flatten(1)


@dataclass(frozen=True, slots=True)
class Nvfp4Scheme:
    """A matrix of NVFP4; see `checkpoint_formats.Scheme`. Inputs are never rounded."""

    packing: Nvfp4Packing

    def hold(self, parameter: Parameter, shards: int | None) -> tuple[RowPacking, Method] | None:
        """See `checkpoint_formats.Scheme`."""
        inputs, is_stack = parameter.shape[-1], parameter.kind == "experts"
        if shards == 1 and not is_stack:
            Columns(GROUP).require_shards(inputs)
        group = group_in(GROUP, inputs)
        if group is None:
            return None
        name = "experts of nvfp4" if is_stack else "nvfp4"
        return self.packing, Stored(name, Encoding("int8", group, torch.float32))
