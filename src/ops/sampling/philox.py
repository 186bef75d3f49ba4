"""Philox4x32-10 in torch, and the Gumbel noise made from it.

Counter-based random numbers: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers: As
Easy as 1, 2, 3", SC'11. Stateless: the word for (seed, position, token) does not depend on what
else is in the batch or was drawn before.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10
_MASK = 0xFFFFFFFF


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of `constant * word`, both below 2**32, in signed 64-bit arithmetic."""
    # The product wraps modulo 2**64. Its bits are right; the mask undoes the sign extension.
    product = word * constant
    return (product >> 32) & _MASK, product & _MASK


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32.

    Parameters
    ----------
    counter
        Four int64 tensors with values in [0, 2**32), broadcastable.
    key
        Two int64 tensors with values in [0, 2**32), broadcastable.

    Returns
    -------
    Four int64 tensors with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high_0, low_0 = _multiply(MULTIPLIER_0, c0)
        high_1, low_1 = _multiply(MULTIPLIER_1, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = (k0 + WEYL_0) & _MASK
        k1 = (k1 + WEYL_1) & _MASK
    return c0, c1, c2, c3


def random_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """The 32 random bits of every token: word `v % 4` at counter (position, v // 4), key seed.

    Parameters
    ----------
    seeds
        [S] int64, all 64 bits used.
    positions
        [S] int64, all 64 bits used.
    vocab_size
        Number of tokens V.

    Returns
    -------
    [S, V] int64 with values in [0, 2**32).
    """
    groups = torch.arange((vocab_size + 3) // 4, device=seeds.device)  # [G] int64, v // 4
    words = philox4x32(
        (
            (positions & _MASK)[:, None],
            ((positions >> 32) & _MASK)[:, None],
            groups & _MASK,
            groups >> 32,
        ),
        ((seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None]),
    )
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def gumbel_from_words(words: Tensor) -> Tensor:
    """Standard Gumbel noise from 32 random bits each, float64.

    With w = (n + 1/2) / 2**32 rounded to float32 and kept below 1, the noise is -log(-log(1 - w)).
    The largest noise decides the argmax and comes from small w, where float32 keeps all 32 bits. So
    the tail is resolved to 2**-33 instead of the 2**-24 of a fixed-point uniform. The noise lies in
    [-2.82, 22.88].
    """
    # [S, V] float32 uniform in [2**-33, 1 - 2**-24]
    uniform = ((words.double() + 0.5) * 2.0**-32).float().clamp_(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform.double()))
