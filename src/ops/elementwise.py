"""Elementwise functions whose results do not depend on where in a tensor an element is.

torch computes a loop over contiguous elements in vectors, and what is left at its end one by one.
For `sigmoid`, `silu`, `gelu` and `softplus` the two ways have different functions, whose last bits
differ. So a token's result would depend on the number of tokens before it, and on where torch cuts
a tensor for its threads. `gelu` also has another library for contiguous tensors, and slices of many
tokens are not contiguous where a slice of one token is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

# torch's loops take two vectors at a time, which are at most 32 elements long (AVX-512, 16 bits).
_LANES: Final = 64
# Up to this size torch computes in one thread: at::internal::GRAIN_SIZE is twice as large, but
# `gelu` has a limit of its own.
_UNCUT_ELEMENTS: Final = 16384


def by_token(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)`, elementwise, with the same bits of a token whatever the other tokens are.

    Parameters
    ----------
    function
        An elementwise function of torch.
    x
        [T, N].

    Returns
    -------
    [T, N], contiguous.
    """
    if torch.compiler.is_compiling():
        # Inductor's loops use one function for a whole row, its rest included.
        return function(x)
    columns = [_in_whole_vectors(function, part) for part in x.split(_UNCUT_ELEMENTS, dim=1)]
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def _in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The same of x [T, N], N at most `_UNCUT_ELEMENTS`."""
    width = x.shape[1]
    padding = -width % _LANES
    # Pieces that torch does not cut for its threads, of nothing but whole vectors. `pad` copies, so
    # that slices are contiguous too.
    pieces = x.split(max(1, _UNCUT_ELEMENTS // (width + padding)))
    made = [function(functional.pad(piece, (0, padding)))[:, :width] for piece in pieces]
    return made[0].contiguous() if len(made) == 1 else torch.cat(made)
