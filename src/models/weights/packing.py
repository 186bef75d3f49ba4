"""Forms in which checkpoints pack weights into bytes; see `parameters.Packing`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from src.models.weights.parameters import StoredForm

# E2M1: one bit of sign, two of the exponent, one of the mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
_BYTES = (torch.uint8,)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Four-bit numbers in blocks of 32 that share a power of two (OCP Microscaling Formats, 2023).

    Values [..., in] are stored as blocks [..., in / 32, 16], two numbers per byte with the first in
    the low half, and scales [..., in / 32], which are exponents plus 127. Every value is exact in
    float32, and in bfloat16.
    """

    BLOCK: ClassVar[int] = 32

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `parameters.Packing`. ``in`` must be a multiple of 32."""
        blocks = (*shape[:-1], shape[-1] // self.BLOCK)
        return {
            "blocks": StoredForm(f"{tensor}_blocks", ((*blocks, self.BLOCK // 2),), _BYTES),
            "scales": StoredForm(f"{tensor}_scales", (blocks,), _BYTES),
        }

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `parameters.Packing`."""
        blocks, scales = stored["blocks"], stored["scales"]
        factors = _powers().index_select(0, scales.flatten().int()).view(scales.shape)
        numbers = _pairs().index_select(0, blocks.flatten().int()).view(*scales.shape, self.BLOCK)
        return numbers.mul_(factors[..., None]).flatten(-2)


def _powers() -> Tensor:
    """The factor of each scale, float32 [256]; the last is infinite."""
    return torch.tensor([2.0 ** (scale - _EXPONENT_BIAS) for scale in range(256)])


def _pairs() -> Tensor:
    """The two numbers of each byte, float32 [256, 2]."""
    numbers = torch.tensor([sign * size for sign in (1.0, -1.0) for size in _MAGNITUDES])
    return torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)
