"""Forms in which checkpoints pack weights into bytes; see `parameters.Packing`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from src.models.weights.levels import SCALES, VALUES
from src.models.weights.methods import QuantizedWeight
from src.models.weights.parameters import Index, StoredForm, allocate_unset
from src.models.weights.stacks import StackedMethod
from src.ops.linear import E2M1, pack_int4, powers_of_two

_BYTES = (torch.uint8,)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Four-bit numbers in blocks of 32 that share a power of two (OCP Microscaling Formats, 2023).

    Values [..., in] are stored as blocks [..., in / 32, 16], two numbers per byte with the first in
    the low half, and scales [..., in / 32], which are exponents plus 127. Every value is exact in
    float32, and in bfloat16.
    """

    BLOCK: ClassVar[int] = 32

    @property
    def is_of_rows(self) -> bool:
        """See `parameters.RowPacking`."""
        return True

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `parameters.Packing`. ``in`` must be a multiple of 32."""
        blocks = (*shape[:-1], shape[-1] // self.BLOCK)
        return {
            "blocks": StoredForm(f"{tensor}_blocks", ((*blocks, self.BLOCK // 2),), _BYTES),
            "scales": StoredForm(f"{tensor}_scales", (blocks,), _BYTES),
        }

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `parameters.Packing`."""
        factors, numbers = powers_of_two(stored["scales"]), torch.tensor(E2M1)
        return numbers[_codes(stored["blocks"]).int()].mul_(factors[..., None]).flatten(-2)

    def rows(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `parameters.RowPacking`."""
        codes = _codes(stored["blocks"]).flatten(-2)
        return {VALUES: pack_int4(codes), SCALES: stored["scales"]}

    def method(self) -> StackedMethod:
        """See `methods.HeldPacking`."""
        return StackedMethod(Mxfp4Method())


def _codes(blocks: Tensor) -> Tensor:
    """The numbers of blocks' bytes, uint8 [..., 32]."""
    return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)


@dataclass(frozen=True, slots=True)
class Mxfp4Method:
    """Holds a matrix as `Mxfp4` has it; see `methods.LinearMethod`."""

    name: str = "mxfp4"

    def staging(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """See `methods.LinearMethod`."""
        rows, inputs = shape
        return {
            VALUES: allocate_unset((rows, inputs // 2), torch.uint8, device),
            SCALES: allocate_unset((rows, inputs // Mxfp4.BLOCK), torch.uint8, device),
        }

    def place(self, part: Tensor, kind: str, index: Index) -> Tensor:
        """See `methods.LinearMethod`."""
        return part[index] if index else part

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """See `methods.LinearMethod`. Values become multiples of half a power of two."""
        blocks = values.float().unflatten(1, (-1, Mxfp4.BLOCK))
        largest = blocks.abs().amax(dim=2, keepdim=True)
        # So that the largest is less than 2, where numbers are evenly spaced.
        exponents = largest.clamp_min_(1e-30).log2().floor().clamp_(-126, 126)
        halves = (blocks.abs() * torch.exp2(1 - exponents)).round_().clamp_(max=3)
        codes = halves.to(torch.uint8) | ((blocks < 0).to(torch.uint8) << 3)
        return {
            VALUES: pack_int4(codes.flatten(1)),
            SCALES: (exponents.squeeze(2) + 127).to(torch.uint8),
        }

    def make(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """See `methods.LinearMethod`."""
        return QuantizedWeight(parts[VALUES], parts[SCALES])
