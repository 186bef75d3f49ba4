"""Forms in which checkpoints pack weights into bytes; see `parameters.Packing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

# E2M1: one bit of sign, two of the exponent, one of the mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Four-bit numbers in blocks of 32 that share a power of two (OCP Microscaling Formats, 2023).

    Values [..., in] are stored as blocks [..., in / 32, 16], two numbers per byte with the first in
    the low half, and scales [..., in / 32], which are exponents plus 127. Every value is exact in
    float32, and in bfloat16.
    """

    BLOCK: ClassVar[int] = 32

    endings: tuple[str, ...] = ("_blocks", "_scales")

    def stored_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """See `parameters.Packing`. ``in`` must be a multiple of 32."""
        blocks = (*shape[:-1], shape[-1] // self.BLOCK)
        return (*blocks, self.BLOCK // 2), blocks

    def unpack(self, stored: Sequence[Tensor]) -> Tensor:
        """See `parameters.Packing`."""
        blocks, scales = stored
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
