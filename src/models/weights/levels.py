"""Levels in groups, as weights have them, and the method that holds parts of this form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from src.models.weights.methods import QuantizedWeight
from src.models.weights.parameters import Index, allocate_unset
from src.ops.linear import pack_int4

VALUES: Final = "values"
SCALES: Final = "scales"
OFFSETS: Final = "offsets"
MIDDLE: Final = 8
"""Of levels of 4 bits."""


@dataclass(frozen=True, slots=True)
class LevelForm:
    """What holds levels of one matrix: inputs of a group, bits (4 or 8), whether it has offsets."""

    group: int
    bits: int
    has_offsets: bool


@dataclass(frozen=True, slots=True)
class LevelMethod:
    """Multiplies by levels and their factors as a file has them; see `methods.LinearMethod`.

    Parts are staged as the weight has them in rows. ``rounds_inputs`` is that of
    `methods.RoundingMethod`.
    """

    form: LevelForm
    rounds_inputs: bool = False

    @property
    def name(self) -> str:
        """See `methods.LinearMethod`."""
        return f"levels of {self.form.bits} bits"

    def staging(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """See `methods.LinearMethod`."""
        rows, inputs = shape
        groups = (rows, inputs // self.form.group)
        is_packed = self.form.bits == 4
        values = (rows, inputs // 2) if is_packed else shape
        parts = {
            VALUES: allocate_unset(values, torch.uint8 if is_packed else torch.int8, device),
            SCALES: allocate_unset(groups, torch.float32, device),
        }
        if self.form.has_offsets:
            parts[OFFSETS] = allocate_unset(groups, torch.float32, device)
        return parts

    def place(self, part: Tensor, kind: str, index: Index) -> Tensor:
        """See `methods.LinearMethod`."""
        return part[index] if index else part

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """See `methods.LinearMethod`."""
        form, rows = self.form, len(values)
        most = 7 if form.bits == 4 else 127
        groups = values.float().view(rows, -1, form.group)
        scales = groups.abs().amax(dim=2).div_(most).clamp_(min=1e-30)
        levels = (groups / scales[..., None]).round_().clamp_(-most, most)
        flat = levels.to(torch.int8).view(rows, -1)
        packed = pack_int4((flat + MIDDLE).view(torch.uint8)) if form.bits == 4 else flat
        parts = {VALUES: packed, SCALES: scales}
        return parts | ({OFFSETS: torch.zeros_like(scales)} if form.has_offsets else {})

    def make(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """See `methods.LinearMethod`."""
        values, scales, offsets = parts[VALUES], parts[SCALES], parts.get(OFFSETS)
        if offsets is None and self.form.bits == 8 and scales.shape[1] == 1:
            scales = scales.squeeze(1)
        return QuantizedWeight.packed(values, scales, offsets, in_strips=self.rounds_inputs)
