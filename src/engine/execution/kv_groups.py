"""Which layers share block tables, and how their memory lies in one pool.

Layers that see the same tokens form a class. Classes are cut into groups of equally many layers,
and every group has its own block tables. The pool has as many slots as a group has layers. Slot i
is the memory of every group's i-th layer. A block of the pool spans all slots and belongs to one
group's table at a time. So every group can use every block, and one list of free blocks serves all
groups in any proportion. If all layers are alike there is one group, and one slot per layer.

A slot has as many tensors as a layer keeps: two for keys and values, one for latents. Tensor j of a
slot is the memory of the j-th tensor of every layer that uses the slot.

Layers whose tensors last a step only (`LayerKVSpec.lasts`) are one group with one slot, which they
use one after the other.

Source of the scheme: vLLM's hybrid KV cache manager (docs.vllm.ai, "Hybrid KV Cache Manager").
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from src.core.blocks import Chunk, Window
from src.models import LayerKVSpec

# Classes whose numbers of layers differ by less than this factor are not cut. The smaller class
# then leaves slots empty.
_UNCUT: Final = 1.5


class KVKind(enum.Enum):
    """What a group's layers see of a sequence, which decides how long its KV is kept."""

    FULL_ATTENTION = "full attention"
    SLIDING_WINDOW = "sliding window"
    CHUNKS = "chunks"


@dataclass(frozen=True)
class KVGroupSpec:
    """Layers that share block tables.

    Attributes
    ----------
    kind
        What its layers see.
    layers
        Numbers of the layers; the i-th uses slot i of the pool, modulo the number of slots.
    window
        What a query sees.
    block_size
        Tokens per block.
    page_blocks
        How many blocks of these layers' byte size fit one block of the pool; the first is used.
        More than 1 where another group's tokens take more bytes. Kernels count blocks of the
        layer's own size, so the numbers in their block tables are multiples of this.
    """

    kind: KVKind
    layers: tuple[int, ...]
    window: Window
    block_size: int
    page_blocks: int = 1


@dataclass(frozen=True)
class KVLayout:
    """The groups of a model, and the slots of the pool.

    Attributes
    ----------
    slot_bytes
        Per slot, and per tensor of the slot: bytes of one block of the pool.
    token_bytes
        Per group: bytes that one token takes in all of its layers.
    """

    groups: tuple[KVGroupSpec, ...]
    slot_bytes: tuple[tuple[int, ...], ...]
    token_bytes: tuple[int, ...]

    @property
    def windows(self) -> tuple[Window, ...]:
        """Per group: what a query sees."""
        return tuple(group.window for group in self.groups)

    @property
    def page_blocks(self) -> tuple[int, ...]:
        """Per group: see `KVGroupSpec`."""
        return tuple(group.page_blocks for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool: all tensors of all slots."""
        return sum(map(sum, self.slot_bytes))

    def part(self, first: int, count: int) -> KVLayout:
        """Some of the layers, numbered from 0. Groups keep their numbers, and may be empty."""
        groups = tuple(
            replace(
                group,
                layers=tuple(
                    layer - first for layer in group.layers if first <= layer < first + count
                ),
            )
            for group in self.groups
        )
        return replace(self, groups=groups)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Layer -> group; -1 for layers that keep nothing of each token."""
        found = {
            layer: number for number, group in enumerate(self.groups) for layer in group.layers
        }
        return tuple(found.get(layer, -1) for layer in range(1 + max(found)))


def lay_out(layers: Sequence[LayerKVSpec], block_size: int) -> KVLayout:
    """Sort a model's layers into groups, with blocks of ``block_size`` tokens.

    Raises
    ------
    ValueError
        Layers of different groups keep tensors that cannot share memory, or none keeps anything
        of each token.
    """
    # Layers that keep something of the sequence as a whole are no part of the pool.
    paged = [number for number, layer in enumerate(layers) if layer.per == "token"]
    if not paged:
        raise ValueError("no layer keeps anything of each token")
    sizes = [layers[number].block_bytes(block_size) for number in paged]
    lasting = {layers[number].lasts for number in paged}
    if "step" in lasting:
        if len(lasting) > 1 or len(set(sizes)) > 1:
            raise ValueError("layers whose keys last a step cannot share memory with others")
        alike = _group(None, paged, block_size, 1)
        return KVLayout((alike,), (sizes[0],), (sum(sizes[0]) // block_size,))
    found, slot_bytes = _grouped([layers[number] for number in paged], sizes, block_size)
    groups = tuple(
        replace(group, layers=tuple(paged[index] for index in group.layers)) for group in found
    )
    token_bytes = tuple(
        sum(sum(tensor.nbytes for tensor in layers[number].tensors) for number in group.layers)
        for group in groups
    )
    return KVLayout(groups, slot_bytes, token_bytes)


def _grouped(
    layers: Sequence[LayerKVSpec], sizes: Sequence[tuple[int, ...]], block_size: int
) -> tuple[tuple[KVGroupSpec, ...], tuple[tuple[int, ...], ...]]:
    if len({layer.window for layer in layers}) == 1:
        everything = _group(layers[0].window, range(len(layers)), block_size, 1)
        return (everything,), tuple(sizes)
    classes: dict[tuple[Window, tuple[int, ...]], list[int]] = {}
    for number, layer in enumerate(layers):
        classes.setdefault((layer.window, sizes[number]), []).append(number)
    counts = [len(members) for members in classes.values()]
    count = max(counts) if max(counts) < _UNCUT * min(counts) else min(counts)
    page = _page([size for _, size in classes])
    groups = [
        _group(window, members[start : start + count], block_size, page[0] // size[0])
        for (window, size), members in classes.items()
        for start in range(0, len(members), count)
    ]
    return tuple(groups), (page,) * count


def _page(sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Per tensor: bytes of a page that is a whole number of blocks of each of these sizes.

    Then the boundaries of blocks coincide. The number has to be the same for all tensors of a
    layer, because they have one block table.
    """
    first = math.lcm(*(size[0] for size in sizes))
    pages = {tuple(first // size[0] * each for each in size) for size in sizes}
    longest = max(pages, key=len)
    if any(page != longest[: len(page)] for page in pages):
        raise ValueError(f"layers with blocks of {sorted(set(sizes))} bytes cannot share memory")
    return longest


def _group(window: Window, layers: Sequence[int], block_size: int, page_blocks: int) -> KVGroupSpec:
    kind = KVKind.FULL_ATTENTION if window is None else KVKind.SLIDING_WINDOW
    if isinstance(window, Chunk):
        kind = KVKind.CHUNKS
    return KVGroupSpec(kind, tuple(layers), window, block_size, page_blocks)
