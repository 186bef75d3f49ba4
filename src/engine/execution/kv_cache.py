"""Sizes and allocates the paged KV memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from src.core.blocks import Chunk, Window, blocks_for, blocks_held
from src.core.config import GIB, MIB, CacheSection
from src.core.errors import ConfigError
from src.core.host_memory import available_memory
from src.engine.devices import give_back_memory
from src.engine.execution.kv_groups import KVGroupSpec, KVLayout, lay_out
from src.engine.execution.state_memory import StateMemory, StatePlan, plan_states
from src.models.layer_kv import KVTensor, LayerKVSpec
from src.ops.host_memory import lazy_zeros

logger = logging.getLogger(__name__)

_DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}
# Fraction of the memory that is free beside the largest step. On a GPU the rest is for
# fragmentation.
_DEFAULT_FRACTION = {"cpu": 0.25, "cuda": 0.9}


@dataclass(frozen=True)
class KVCachePlan:
    """The number of blocks and their size.

    Attributes
    ----------
    block_size
        Tokens per block.
    bytes_per_block
        Bytes of a block over all tensors of all slots.
    windows
        Per group of layers: what a query sees.
    states
        Slots for recurrent states; ``None`` if the model has none.
    """

    block_size: int
    num_blocks: int
    bytes_per_block: int
    windows: tuple[Window, ...] = (None,)
    states: StatePlan | None = None

    def num_rows(self, max_num_seqs: int) -> int:
        """How many of ``max_num_seqs`` rows there is memory for."""
        return max_num_seqs if self.states is None else self.states.num_rows

    def blocks_held(self, num_tokens: int) -> int:
        """Blocks of all groups that a request of ``num_tokens`` tokens needs at least."""
        return sum(blocks_held(num_tokens, self.block_size, window) for window in self.windows)

    def longest(self, most: int) -> int:
        """Tokens, up to ``most``, of the longest request that fits when it runs alone."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_held(middle) <= self.num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool, and of recurrent states."""
        states = 0 if self.states is None else self.states.total_bytes
        return self.bytes_per_block * self.num_blocks + states


@dataclass(frozen=True)
class KVCache:
    """The pool's tensors.

    Attributes
    ----------
    layers
        Per layer, its tensors by name, in the order of its `LayerKVSpec`: [blocks, block_size,
        *shape]. Layers of different groups may share memory. The number of blocks is the pool's,
        or a multiple of it (`page_blocks`). Of recurrent states: [state slots, *shape].
    memory
        Every tensor of the pool once, slot by slot.
    states
        The memory of recurrent states; ``None`` if the model has none.
    """

    plan: KVCachePlan
    layout: KVLayout
    layers: list[dict[str, Tensor]]
    memory: list[Tensor] = field(repr=False)
    states: StateMemory | None = field(default=None, repr=False)

    def part(self, first: int, count: int) -> KVCache:
        """The memory of some of the layers, numbered from 0, in the same pool."""
        layers = self.layers[first : first + count]
        return replace(self, layout=self.layout.part(first, count), layers=layers)

    def named(self) -> dict[str, Tensor]:
        """Every tensor of every layer, as ``<name>.<layer>``."""
        return {
            f"{name}.{number}": tensor
            for number, tensors in enumerate(self.layers)
            for name, tensor in tensors.items()
        }


def plan_kv_cache(
    layers: Sequence[LayerKVSpec],
    section: CacheSection,
    *,
    device: torch.device,
    max_num_seqs: int,
    max_model_len: int,
    max_model_len_is_fixed: bool,
    may_shorten: bool = True,
    reserved_bytes: int = 0,
    free_bytes: int | None = None,
    state_backups: int = 0,
    backups_are_spare: bool = False,
) -> tuple[KVCachePlan, int]:
    """Choose the number of blocks; returns the plan and the context length in tokens.

    If no size is configured, the pool is at most what ``max_num_seqs`` sequences of
    ``max_model_len`` tokens take. A configured size may be larger; the excess serves the prefix
    cache. Layers with a window return most of their blocks while a sequence grows, which also
    leaves room for the prefix cache. A context length that the user did not fix is lowered to what
    fits. Recurrent states take up to half of the memory, see `plan_states`.

    Parameters
    ----------
    may_shorten
        Whether a context length that the user did not fix may be lowered.
    reserved_bytes
        Bytes of the free memory that will be taken for other purposes.
    free_bytes
        Bytes that may still be allocated; ``None``: on ``device`` as it is now. With a number, the
        device need not be here.
    state_backups
        The most rows of a step that may have drafts although they have recurrent states.
    backups_are_spare
        See `plan_states`.

    Raises
    ------
    ConfigError
        Not even one block fits, or a ``max_model_len`` that may not be lowered does not.
    """
    block_size = block_size_of(section, device)
    layout = lay_out(layers, block_size)
    bytes_per_block = layout.bytes_per_block
    free = max(0, (free_memory(device) if free_bytes is None else free_bytes) - reserved_bytes)
    budget = section.memory_bytes or _budget(section, device.type, free)
    states = plan_states(
        layers,
        budget,
        max_num_seqs,
        snapshots=section.enable_prefix_caching,
        backups=state_backups,
        backups_are_spare=backups_are_spare,
    )
    budget -= 0 if states is None else states.total_bytes
    num_blocks = section.num_blocks or budget // bytes_per_block
    plan = KVCachePlan(block_size, num_blocks, bytes_per_block, layout.windows, states)
    if section.num_blocks is section.memory_bytes is section.memory_fraction is None:
        whole = len(layout.windows) * blocks_for(max_model_len, block_size)
        num_blocks = min(num_blocks, plan.num_rows(max_num_seqs) * whole)
        plan = replace(plan, num_blocks=num_blocks)
    if num_blocks < 1:
        raise ConfigError(
            f"cache: {budget / MIB:.1f} MiB of KV memory do not hold one block of {block_size} "
            f"tokens ({bytes_per_block / MIB:.1f} MiB)"
        )
    longest = plan.longest(max_model_len)
    if longest < max_model_len:
        if max_model_len_is_fixed or longest < 1:
            raise ConfigError(
                f"model.max_model_len = {max_model_len} does not fit KV memory of "
                f"{longest} tokens ({plan.total_bytes / GIB:.2f} GiB): lower it or "
                "raise cache.memory_bytes"
            )
        if not may_shorten:
            raise ConfigError(f"the context would be lowered to {longest} tokens")
        logger.warning(
            "context lowered from %d to %d tokens, what KV memory holds",
            max_model_len,
            longest,
        )
        max_model_len = longest
    if device.type == "cpu" and plan.total_bytes > free:
        # The system gives memory when it is touched, so the allocation itself does not fail.
        logger.warning(
            "KV memory of %.2f GiB is more than the %.2f GiB that are free: when it is used, the "
            "system may end this process",
            plan.total_bytes / GIB,
            free / GIB,
        )
    logger.info(
        "KV memory: %d blocks of %d tokens, %.2f GiB, %s: %.1f requests of %d tokens at once",
        num_blocks,
        block_size,
        plan.total_bytes / GIB,
        _told(layout, layers) + ("" if states is None else f"; {states}"),
        num_blocks / plan.blocks_held(max_model_len),
        max_model_len,
    )
    return plan, max_model_len


def block_size_of(section: CacheSection, device: torch.device) -> int:
    """Tokens per block."""
    return section.block_size or _DEFAULT_BLOCK_SIZE[device.type]


def allocate_kv_cache(
    layers: Sequence[LayerKVSpec], plan: KVCachePlan, device: torch.device, *, poison: bool = False
) -> KVCache:
    """Allocate the pool. ``poison`` fills it with NaN, which shows reads of unwritten memory.

    Host memory is given by the system as it is touched, so a large pool costs nothing until then.
    """
    layout = lay_out(layers, plan.block_size)
    of_layer: dict[int, dict[str, Tensor]] = {}
    memory: list[Tensor] = []
    for slot in range(len(layout.slot_bytes)):
        # Tensors of the slot's first layer; those of its other layers are views of them.
        shared: list[Tensor] = []
        for group in sorted(layout.groups, key=lambda group: -len(_at(layers, group, slot))):
            if slot >= len(group.layers):
                continue
            layer = layers[group.layers[slot]]
            blocks = plan.num_blocks * group.page_blocks
            shapes = [(blocks, *shape) for shape in layer.block_shapes(plan.block_size)]
            outlines = list(zip(layer.tensors, shapes, strict=True))
            if not shared:
                shared = [_allocate(shape, t.dtype, device, poison) for t, shape in outlines]
                memory += shared
            of_layer[group.layers[slot]] = {
                tensor.name: _as(held, shape, tensor.dtype)
                for held, (tensor, shape) in zip(shared, outlines, strict=False)
            }
    for group in layout.groups:
        for index, number in enumerate(group.layers):
            # More layers than slots use them one after the other.
            of_layer.setdefault(number, of_layer[group.layers[index % len(layout.slot_bytes)]])
    states = None
    if any(layer.per == "sequence" for layer in layers):
        # A trial's plan has no slots: one row will do.
        outline = plan.states or plan_states(layers, sys.maxsize, 1, snapshots=False)
        assert outline is not None
        states = StateMemory(layers, outline, device, poison=poison)
        of_layer |= states.layers
    ordered = [of_layer[number] for number in range(len(layers))]
    return KVCache(plan, layout, ordered, memory, states)


def _at(layers: Sequence[LayerKVSpec], group: KVGroupSpec, slot: int) -> tuple[KVTensor, ...]:
    """What the group's layer in a slot keeps; nothing if it has none."""
    return layers[group.layers[slot]].tensors if slot < len(group.layers) else ()


def _allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, poison: bool
) -> Tensor:
    if device.type == "cpu":
        tensor = lazy_zeros(shape, dtype)
    else:
        tensor = torch.zeros(shape, dtype=dtype, device=device)
    if poison:
        # All bits set is NaN in every float type, and in the factor of a row of codes.
        tensor.view(torch.uint8).fill_(255)
    return tensor


def _as(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same memory as another layer sees it."""
    if tensor.shape == shape and tensor.dtype == dtype:
        return tensor
    return tensor.view(-1).view(torch.uint8).view(dtype).view(shape)


def _extent(window: Window) -> str:
    if isinstance(window, Chunk):
        return f"chunks of {window.size} tokens"
    return "all tokens" if window is None else f"window of {window} tokens"


def _told(layout: KVLayout, layers: Sequence[LayerKVSpec]) -> str:
    """The groups, for the log."""
    told = [
        f"{len(group.layers)} layers, {_extent(group.window)}, "
        + f"{' and '.join(sorted({layers[number].kind for number in group.layers}))} of "
        + f"{layout.token_bytes[index]:,} bytes per token"
        for index, group in enumerate(layout.groups)
    ]
    return "; ".join(f"{told.count(one)} x {one}" for one in dict.fromkeys(told))


def _budget(section: CacheSection, device_type: str, free: int) -> int:
    """Bytes of KV memory as a fraction of the free memory."""
    if section.memory_fraction is not None:
        return int(section.memory_fraction * free)
    return int(_DEFAULT_FRACTION[device_type] * free)


def free_memory(device: torch.device) -> int:
    """Bytes that may still be allocated on ``device``, at least 0."""
    if device.type == "cuda":
        # Memory that torch's allocator keeps of freed tensors counts as free.
        give_back_memory(device.type)
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()
