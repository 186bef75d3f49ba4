"""Forms in which checkpoints pack weights into bytes; see `parameters.Packing`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from src.models.weights.methods import SCALES, VALUES, Stored
from src.models.weights.parameters import StoredForm
from src.ops.matrix import E2M1, Encoding, pack_int4, powers_of_two

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

    def method(self) -> Stored:
        """See `methods.StoredPacking`."""
        return Stored("experts of mxfp4", Encoding("e2m1", self.BLOCK, torch.uint8))


def _codes(blocks: Tensor) -> Tensor:
    """The numbers of blocks' bytes, uint8 [..., 32]."""
    return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
