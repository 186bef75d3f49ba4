"""Which layers share block tables, and how their keys and values lie in one pool.

Layers that see the same tokens form a class. Classes are cut into groups of equally many layers,
and every group has its own block tables. The pool has as many slots as a group has layers. Slot i
is the memory of every group's i-th layer. A block of the pool spans all slots and belongs to one
group's table at a time. So every group can use every block, and one list of free blocks serves all
groups in any proportion. If all layers are alike there is one group, and one slot per layer.

Source of the scheme: vLLM's hybrid KV cache manager (docs.vllm.ai, "Hybrid KV Cache Manager").
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from src.models import LayerKVSpec

# Classes whose numbers of layers differ by less than this factor are not cut. The smaller class
# then leaves slots empty.
_UNCUT: Final = 1.5


class KVKind(enum.Enum):
    """The attention kind of a group, which decides how long its KV is kept."""

    FULL_ATTENTION = "full attention"
    SLIDING_WINDOW = "sliding window"


@dataclass(frozen=True)
class KVGroupSpec:
    """Layers that share block tables.

    Attributes
    ----------
    kind
        The attention kind.
    layers
        Numbers of the layers; the i-th uses slot i of the pool.
    window
        Tokens that a query sees, itself included; ``None`` is all.
    block_size
        Tokens per block.
    page_blocks
        How many blocks of these layers' byte size fit one block of the pool; the first is used.
        More than 1 where another group's tokens take more bytes. Kernels count blocks of the
        layer's own size, so the numbers in their block tables are multiples of this.
    """

    kind: KVKind
    layers: tuple[int, ...]
    window: int | None
    block_size: int
    page_blocks: int = 1


@dataclass(frozen=True)
class KVLayout:
    """The groups of a model, and the slots of the pool.

    Attributes
    ----------
    slot_bytes
        Bytes of one block's keys in each slot; its values take as many.
    """

    groups: tuple[KVGroupSpec, ...]
    slot_bytes: tuple[int, ...]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per group: tokens that a query sees; ``None`` is all."""
        return tuple(group.window for group in self.groups)

    @property
    def page_blocks(self) -> tuple[int, ...]:
        """Per group: see :class:`KVGroupSpec`."""
        return tuple(group.page_blocks for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool: keys and values in all slots."""
        return 2 * sum(self.slot_bytes)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Layer -> group."""
        found = {
            layer: number for number, group in enumerate(self.groups) for layer in group.layers
        }
        return tuple(found[layer] for layer in range(len(found)))


def lay_out(layers: Sequence[LayerKVSpec], block_size: int) -> KVLayout:
    """Sort a model's layers into groups, with blocks of ``block_size`` tokens."""
    sizes = [block_size * _bytes_per_token(layer) for layer in layers]
    if len({layer.sliding_window for layer in layers}) == 1:
        everything = _group(layers[0].sliding_window, range(len(layers)), block_size, 1)
        return KVLayout((everything,), tuple(sizes))
    classes: dict[tuple[int | None, int], list[int]] = {}
    for number, layer in enumerate(layers):
        classes.setdefault((layer.sliding_window, sizes[number]), []).append(number)
    counts = [len(members) for members in classes.values()]
    count = max(counts) if max(counts) < _UNCUT * min(counts) else min(counts)
    # A page has to be a whole number of every group's blocks, so that block boundaries coincide.
    page = math.lcm(*(size for _, size in classes))
    groups = [
        _group(window, members[start : start + count], block_size, page // size)
        for (window, size), members in classes.items()
        for start in range(0, len(members), count)
    ]
    return KVLayout(tuple(groups), (page,) * count)


def _group(
    window: int | None, layers: Sequence[int], block_size: int, page_blocks: int
) -> KVGroupSpec:
    kind = KVKind.FULL_ATTENTION if window is None else KVKind.SLIDING_WINDOW
    return KVGroupSpec(kind, tuple(layers), window, block_size, page_blocks)


def _bytes_per_token(layer: LayerKVSpec) -> int:
    """Bytes of one token's keys; its values take as many."""
    return layer.num_kv_heads * layer.head_dim * layer.dtype.itemsize
