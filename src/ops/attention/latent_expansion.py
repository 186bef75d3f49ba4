"""Which rows of latent attention are expanded: the policy of all devices, and its plan for a GPU.

See `latent_attention` for the two ways. A row's way depends on its own lengths alone, never on the
rest of the batch.

The CPU's kernel decides for itself (`Latent::is_expanded` in `latent_attention.cpp`), by the same
rule, but that it absorbs rows which verify drafts. A GPU's kernels get a plan, because the host has
to know how many keys are expanded: it launches a series of kernels for each piece of them. The host
knows the lengths of rows, so no plan waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

FEWEST_ON_GPU = 32
"""Rows with fewer queries are absorbed on a GPU.

Expanded, each head has tiles of its own, which so few queries leave mostly empty. Absorbed, the
heads of a token share a tile.
"""

Lengths = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]


class LatentShape(NamedTuple):
    """Sizes of latent attention; see `latent_attention` for their meaning."""

    nope: int
    rope: int
    rank: int
    value: int

    @classmethod
    def of(cls, up: Tensor, width: int, value: int) -> LatentShape:
        """From the projection [heads, nope + value, rank] and the size of a cached vector."""
        rank = up.shape[2]
        return cls(up.shape[1] - value, width - rank, rank, value)


def is_expanded(queries: Lengths, keys: Lengths, shape: LatentShape, fewest: int) -> Marks:
    """Whether rows need fewer products if they are expanded: [B] bool.

    The products are counted per head. Either way projects once: queries and results, or the
    context. Expanded keys and values have the size of the wider of both.

    Parameters
    ----------
    queries, keys
        [B]: query tokens, and context lengths with these tokens.
    fewest
        Rows with fewer queries are absorbed in any case.
    """
    wide = -(-max(shape.nope + shape.rope, shape.value) // 8) * 8
    pairs = queries * keys - queries * (queries - 1) // 2
    projection = shape.rank * (shape.nope + shape.value)
    expanded = keys * projection + pairs * 2 * wide
    absorbed = queries * projection + pairs * 2 * (shape.rank + shape.rope)
    pays: Marks = (queries >= max(1, fewest)) & (expanded < absorbed)
    return pays


class Expansion(NamedTuple):
    """The rows of a step that a GPU expands.

    Attributes
    ----------
    plan
        [B + 1 + T] int32. The first B + 1: row -> number of expanded keys before it, so a row
        without any is absorbed. Then token -> 1 if its row is expanded, else 0.
    keys
        Number of expanded keys.
    """

    plan: npt.NDArray[np.int32]
    keys: int


def plan_expansion(queries: Lengths, keys: Lengths, shape: LatentShape) -> Expansion | None:
    """The plan of a step with these rows; `None` if all of them are absorbed.

    A step without tokens gets a plan without keys, so that warming up launches every kernel.

    Parameters
    ----------
    queries, keys
        As in [`is_expanded`][], rows in the order of the step.
    """
    expanded = is_expanded(queries, keys, shape, FEWEST_ON_GPU)
    if queries.any() and not expanded.any():
        return None
    before = np.concatenate(((0,), np.where(expanded, keys, 0).cumsum()))
    marks = np.repeat(expanded, queries)
    return Expansion(np.concatenate((before, marks)).astype(np.int32), int(before[-1]))
