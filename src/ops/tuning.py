"""Tile sizes of the attention kernels, by device and dtype: only a table.

Nothing is tuned while serving. `python -m benchmarks.tune_kernels` measures on a GPU and prints
rows for this table, and for those of experts and of latent attention.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

Shape = TypeVar("Shape")

NEVER_RUN_ON = 6
"""Programs of a persistent grid without a GPU, i.e. in Triton's interpreter."""


class PrefillShape(NamedTuple):
    """Size of one program of the prefill kernel."""

    packed: int
    """Packed query rows (the query heads of one token and kv head are adjacent)."""
    keys: int
    warps: int
    stages: int


class DecodeShape(NamedTuple):
    """Size of one program of the decode kernel."""

    tile: int
    """Keys of a tile."""
    programs: int
    """Programs per multiprocessor; all of them must fit onto it at the same time."""
    warps: int
    stages: int


# (compute capability or 0 for all others, head_dim padded to a power of two, bytes of an element)
# -> shape. An entry also serves smaller heads. The general entries are reasoned, not measured: they
# fit into Hopper's shared memory, for which the tests compile them. They have five stages because
# Triton divides stages among the loads of a chain (block number, then keys): so two tiles are in
# flight. The entries of Hopper (90) were the fastest of those that were measured on an H200.
_PREFILL = {
    (90, 128, 2): PrefillShape(64, 64, 4, 5),
    (0, 128, 2): PrefillShape(128, 64, 8, 5),
    (0, 256, 2): PrefillShape(64, 32, 4, 2),
    (0, 128, 4): PrefillShape(64, 64, 4, 1),
    (0, 256, 4): PrefillShape(64, 32, 4, 1),
}
_DECODE = {
    (0, 128, 2): DecodeShape(64, 2, 4, 5),
    (0, 256, 2): DecodeShape(32, 2, 4, 5),
    (0, 128, 4): DecodeShape(64, 2, 4, 2),
    (0, 256, 4): DecodeShape(32, 2, 4, 2),
}
_FEW_ROWS = 1024
"""Up to so many packed query rows, a batch would leave large prefill tiles half empty."""


def prefill_shape(
    capability: int, padded: int, element_size: int, packed: int | None
) -> PrefillShape:
    """The program size of the prefill kernel.

    Parameters
    ----------
    capability
        Compute capability, 90 for 9.0.
    padded
        head_dim rounded up to a power of two.
    element_size
        Bytes of an element of queries and cache.
    packed
        Packed query rows of the whole batch; `None` for a size that does not depend on the batch.
    """
    shape = _find(_PREFILL, capability, padded, element_size)
    if shape.packed > 64 and (packed is None or packed <= _FEW_ROWS):
        return shape._replace(packed=64, warps=4)
    return shape


def decode_shape(capability: int, padded: int, element_size: int) -> DecodeShape:
    """The program size of the decode kernel; arguments as in [`prefill_shape`][]."""
    return _find(_DECODE, capability, padded, element_size)


def computed_size(key_cache: torch.Tensor) -> int:
    """Bytes of an element of keys and values in products; codes become 16 bits there."""
    return max(2, key_cache.element_size())


def packed_rows(group: int) -> int:
    """Rows of the decode kernel's matrix product; tensor cores need at least 16.

    Parameters
    ----------
    group
        Query heads per kv head.
    """
    return max(16, 1 << (group - 1).bit_length())


def _find(
    table: dict[tuple[int, int, int], Shape], capability: int, padded: int, element_size: int
) -> Shape:
    width = 128 if padded <= 128 else 256
    general = table[0, width, element_size]
    return table.get((capability, width, element_size), general)


def of_capability(table: dict[tuple[int, Any], Shape], capability: int, key: Any) -> Shape:
    """The entry of a compute capability; where it has none, that of all others (0)."""
    return table.get((capability, key), table[0, key])


def of_device(table: dict[tuple[int, Any], Shape], device: torch.device, key: Any) -> Shape:
    """The entry of a device's compute capability, as in [`of_capability`][]."""
    return of_capability(table, capability_of(device), key)


@cache
def capability_of(device: torch.device) -> int:
    """Compute capability, 90 for 9.0; 0 where there is no GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return NEVER_RUN_ON
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
