"""Which layers share block tables, and how their keys and values lie in one pool.

Layers that see the same tokens form a class. Classes are cut into groups of equally many layers,
and every group has block tables of its own. The pool has as many slots as a group has layers: slot
i is the memory of every group's i-th layer, and a block of the pool, all slots of it, belongs to
one group's table at a time. So a block is worth the same to every group, and one list of free
blocks serves them all, however much of it each wants. Where all layers are alike there is one
group, and a slot for each layer.

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

# Classes whose sizes differ by less than this factor are not cut: the smaller one leaves slots
# empty instead.
_UNCUT: Final = 1.5


class KVKind(enum.Enum):
    """What a group's layers keep, and for how long."""

    FULL_ATTENTION = "full attention"
    SLIDING_WINDOW = "sliding window"


@dataclass(frozen=True)
class KVGroupSpec:
    """Layers that share block tables.

    Attributes
    ----------
    kind
        What they keep.
    layers
        Their numbers; the i-th has slot i of the pool.
    window
        Tokens that a query of theirs sees, itself included; ``None`` is all.
    block_size
        Tokens of a block.
    page_blocks
        Blocks of these layers' size that a block of the pool has room for, of which the first is
        used. More than 1 where another group's tokens take more bytes: the numbers in the tables of
        kernels, which count blocks of the layer's own size, are multiples of it.
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
        Bytes of a block in each slot, of keys and as many of values.
    """

    groups: tuple[KVGroupSpec, ...]
    slot_bytes: tuple[int, ...]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per group, the tokens that a query sees."""
        return tuple(group.window for group in self.groups)

    @property
    def page_blocks(self) -> tuple[int, ...]:
        """Per group, what the numbers in its tables are multiples of."""
        return tuple(group.page_blocks for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of the pool: keys and values in all slots."""
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
    # A whole number of every group's blocks, or their places would not coincide.
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
    """Of keys, and as many of values."""
    return layer.num_kv_heads * layer.head_dim * layer.dtype.itemsize
