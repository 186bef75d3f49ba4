"""The types of GGUF tensors: what their blocks hold, exactly.

A block is a run of values of one row that share scales. Every type that is read stands for

    value = level * scale - offset

with small integers as levels, and one scale and perhaps one offset for each group of a block
(https://github.com/ggml-org/ggml, `ggml-common.h` and `ggml-quants.c`). Scales are products of
at most 17 bits, so float32 holds them exactly, and every type is read without any rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Levels(NamedTuple):
    """Blocks as integers and their factors."""

    levels: Tensor  # int8 [blocks, values]
    scales: Tensor  # float32 [blocks, groups]
    offsets: Tensor | None  # float32 [blocks, groups]; None: zeros

    def values(self) -> Tensor:
        """The values, float32 [blocks, values]."""
        grouped = self.levels.view(*self.scales.shape, -1).float().mul_(self.scales[..., None])
        if self.offsets is not None:
            grouped.sub_(self.offsets[..., None])
        return grouped.flatten(1)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks with shared scales.

    Attributes
    ----------
    group
        Values that share a scale.
    bits
        Of the levels in this engine's memory: 4 or 8. With 4 they are 0 to 15 if there are
        offsets, else -8 to 7.
    has_offsets
        Whether groups have offsets.
    unpack
        From bytes [blocks, size] to their levels.
    nibbles
        Where the levels of a block begin that has them as `pack_int4` does: 32 of 4 bits, the
        first 16 in low halves; None for other types.
    """

    group: int
    bits: int
    has_offsets: bool
    unpack: Callable[[Tensor], Levels]
    nibbles: int | None = None

    @property
    def is_packed(self) -> bool:
        """Whether `packed` can be called."""
        return self.nibbles is not None

    def packed(self, blocks: Tensor) -> Levels:
        """What `unpack` returns, but with the levels as `pack_int4` packs them.

        Levels without offsets are counted from -8, those with offsets from 0.
        """
        offsets = -_halves(blocks, 2) if self.has_offsets else None
        return Levels(blocks[:, self.nibbles :].contiguous(), _halves(blocks, 0), offsets)


def _halves(blocks: Tensor, begin: int, count: int = 1) -> Tensor:
    """Some float16 numbers of each block, as float32 [blocks, count]."""
    return blocks[:, begin : begin + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes as [..., 2 n] values: those in the low halves first."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """[blocks, n] bytes as [blocks, 8 n] bits, the lowest of the first byte first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[..., None] >> shifts) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Levels:
    levels = _nibbles(blocks[:, 2:]).view(torch.int8) - 8
    return Levels(levels, _halves(blocks, 0), None)


def _q4_1(blocks: Tensor) -> Levels:
    levels = _nibbles(blocks[:, 4:]).view(torch.int8)
    return Levels(levels, _halves(blocks, 0), -_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Levels:
    levels = _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return Levels(levels.view(torch.int8) - 16, _halves(blocks, 0), None)


def _q5_1(blocks: Tensor) -> Levels:
    levels = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return Levels(levels.view(torch.int8), _halves(blocks, 0), -_halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Levels:
    return Levels(blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0), None)


def _factors_of_eight(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minima of a block's eight groups, of 6 bits each, in 12 bytes.

    The first four of each are the low bits of bytes 0 to 3 and 4 to 7. The last four have their
    low bits in the halves of bytes 8 to 11, and their high bits above the others.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.float(), minima.float()


def _by_pairs(packed: Tensor) -> Tensor:
    """[blocks, 128] bytes as 256 values: each 32 bytes hold a group in low halves, one in high."""
    return _nibbles(packed.reshape(len(packed), 4, 32)).flatten(1)


def _scaled(levels: Tensor, blocks: Tensor) -> Levels:
    scales, minima = _factors_of_eight(blocks[:, 4:16])
    return Levels(levels.view(torch.int8), scales * _halves(blocks, 0), minima * _halves(blocks, 2))


def _q4_k(blocks: Tensor) -> Levels:
    return _scaled(_by_pairs(blocks[:, 16:]), blocks)


def _q5_k(blocks: Tensor) -> Levels:
    # Bit i of the 32 bytes belongs to group i.
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((blocks[:, None, 16:48] >> shifts) & 1).flatten(1)
    return _scaled(_by_pairs(blocks[:, 48:]) | (high << 4), blocks)


def _q6_k(blocks: Tensor) -> Levels:
    count = len(blocks)
    # Two halves of 128 values. Of each, 64 bytes hold low bits and 32 bytes two high bits of four
    # runs of 32.
    low = _nibbles(blocks[:, :128].reshape(count, 2, 64)).view(count, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(count, 2, 1, 32) >> shifts) & 3
    levels = (low | (high << 4)).flatten(1).view(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Levels(levels, scales * _halves(blocks, 208), None)


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 4, False, _q4_0, nibbles=2),
    "Q4_1": BlockType(32, 4, True, _q4_1, nibbles=4),
    "Q5_0": BlockType(32, 8, False, _q5_0),
    "Q5_1": BlockType(32, 8, True, _q5_1),
    "Q8_0": BlockType(32, 8, False, _q8_0),
    "Q4_K": BlockType(32, 4, True, _q4_k),
    "Q5_K": BlockType(32, 8, True, _q5_k),
    "Q6_K": BlockType(16, 8, False, _q6_k),
}
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def require_finite(*factors: Tensor | None) -> None:
    """Refuse scales or offsets of blocks.

    Raises
    ------
    ValueError
        One is infinite or not a number.
    """
    if not all(each.isfinite().all() for each in factors if each is not None):
        raise ValueError("the scales of its blocks must be finite numbers")


def decode(raw: Tensor, kind: str) -> Tensor:
    """The values of whole blocks: from bytes [blocks, size], [blocks, values] in float32.

    Raises
    ------
    ValueError
        See `require_finite`.
    """
    found = BLOCK_TYPES[kind].unpack(raw)
    require_finite(found.scales, found.offsets)
    return found.values()
