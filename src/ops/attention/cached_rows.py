"""How a head's key or value of one token lies in the paged cache: as it is, or in 8 bits.

In 8 bits a row is `head_dim` codes of one byte, then a float32 factor by which they are multiplied.
Every token and head has a factor of its own, found from the numbers themselves. So nothing has to
be calibrated, a block of the cache needs nothing beside itself, and a row never changes once it is
written. The dtype of the cache tells what the codes are.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

FACTOR_BYTES = 4


class Codes(NamedTuple):
    """One kind of codes.

    Attributes
    ----------
    name
        What settings and logs call it.
    kind
        The number by which kernels know it: a CacheKind of `abi.h`, and CODES in Triton.
    largest
        The code of a row's largest number.
    """

    name: str
    kind: int
    largest: float


CODES = MappingProxyType(
    {torch.int8: Codes("int8", 1, 127.0), torch.float8_e4m3fn: Codes("fp8", 2, 448.0)}
)
"""Every kind, by the dtype of its codes."""


def is_coded(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype has codes and factors."""
    return dtype in CODES


def kind_of(dtype: torch.dtype) -> int:
    """The number by which kernels know a cache of this dtype; 0: it has no codes."""
    return CODES[dtype].kind if is_coded(dtype) else 0


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a cache of this dtype that one key or value of a head takes."""
    return head_dim + (FACTOR_BYTES if is_coded(dtype) else 0)


def to_rows(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., row_size] of a cache of this dtype from keys or values [..., head_dim].

    Codes are rounded to nearest, ties to even. A row that is not finite gets a factor that is not.
    """
    if not is_coded(dtype):
        return numbers.to(dtype)
    wide, largest = numbers.float(), CODES[dtype].largest
    most = wide.abs().amax(-1, keepdim=True)
    # By a tensor: on CUDA torch multiplies by the reciprocal of a number, and loses one bit. The
    # kernels divide.
    factors = most / torch.full_like(most, largest)
    usable = (factors > 0) & factors.isfinite()
    codes = torch.where(usable, wide / torch.where(usable, factors, 1.0), 0.0)
    codes = codes.clamp(-largest, largest)
    if dtype == torch.int8:
        codes = codes.round()
    parts = codes.to(dtype).view(torch.uint8), factors.contiguous().view(torch.uint8)
    return torch.cat(parts, dim=-1).view(dtype)


def from_rows(rows: Tensor) -> Tensor:
    """Keys or values [..., head_dim] in float32 of rows [..., row_size]."""
    if not is_coded(rows.dtype):
        return rows.float()
    octets = rows.view(torch.uint8)
    codes, factors = octets[..., :-FACTOR_BYTES], octets[..., -FACTOR_BYTES:]
    return codes.view(rows.dtype).float() * factors.contiguous().view(torch.float32)


def write_rows(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Put token t of `new` ([T, kv_heads, head_dim]) into slot `slots[t]` of a cache."""
    block_size = cache.shape[1]
    rows = to_rows(new, cache.dtype)
    if is_coded(cache.dtype):
        # torch does not index every dtype of codes.
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache[slots // block_size, slots % block_size] = rows
