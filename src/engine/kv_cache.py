"""Sizes and allocates the paged KV memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from src.core.config import GIB, MIB, CacheSection
from src.core.errors import ConfigError
from src.models.decoder import LayerKVSpec

logger = logging.getLogger(__name__)

_DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}
_DEFAULT_FRACTION = {"cpu": 0.25, "cuda": 0.9}


@dataclass(frozen=True)
class KVCachePlan:
    """How many blocks there are and what they cost.

    One group today: every layer has one entry in every block, so one block table serves all layers.
    """

    block_size: int  # tokens
    num_blocks: int
    bytes_per_block: int  # over all layers, keys and values

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.block_size * self.num_blocks

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.bytes_per_block * self.num_blocks


@dataclass(frozen=True)
class KVCache:
    """The pool's tensors.

    ``keys[i]`` and ``values[i]``: [num_blocks, block_size, num_kv_heads, head_dim] of layer i.
    """

    plan: KVCachePlan
    keys: list[Tensor]
    values: list[Tensor]


def plan_kv_cache(
    layers: Sequence[LayerKVSpec],
    section: CacheSection,
    *,
    device: torch.device,
    max_num_seqs: int,
    max_model_len: int,
    max_model_len_is_fixed: bool,
) -> tuple[KVCachePlan, int]:
    """Choose the number of blocks; returns the plan and the context length that it allows.

    The pool is never larger than ``max_num_seqs`` sequences of ``max_model_len`` tokens can use. A
    context length that the user did not fix is lowered to what fits.

    Raises
    ------
    ConfigError
        When not even one block fits, or a fixed ``max_model_len`` does not.
    """
    block_size = section.block_size or _DEFAULT_BLOCK_SIZE[device.type]
    bytes_per_block = block_size * sum(
        2 * layer.num_kv_heads * layer.head_dim * layer.dtype.itemsize for layer in layers
    )
    budget = section.memory_bytes or int(
        (section.memory_fraction or _DEFAULT_FRACTION[device.type]) * free_memory(device)
    )
    blocks_per_seq = -(-max_model_len // block_size)
    num_blocks = section.num_blocks or min(budget // bytes_per_block, max_num_seqs * blocks_per_seq)
    plan = KVCachePlan(block_size, num_blocks, bytes_per_block)
    if num_blocks < 1:
        raise ConfigError(
            f"cache: {budget / MIB:.1f} MiB of KV memory do not hold one block of {block_size} "
            f"tokens ({bytes_per_block / MIB:.1f} MiB)"
        )
    if plan.capacity_tokens < max_model_len:
        if max_model_len_is_fixed:
            raise ConfigError(
                f"model.max_model_len = {max_model_len} does not fit KV memory of "
                f"{plan.capacity_tokens} tokens ({plan.total_bytes / GIB:.2f} GiB): lower it or "
                "raise cache.memory_bytes"
            )
        logger.warning(
            "context lowered from %d to %d tokens, what KV memory holds",
            max_model_len,
            plan.capacity_tokens,
        )
        max_model_len = plan.capacity_tokens
    logger.info(
        "KV memory: %d blocks of %d tokens, %.2f GiB, %d tokens: %.1f requests of %d at once",
        num_blocks,
        block_size,
        plan.total_bytes / GIB,
        plan.capacity_tokens,
        plan.capacity_tokens / max_model_len,
        max_model_len,
    )
    return plan, max_model_len


def allocate_kv_cache(
    layers: Sequence[LayerKVSpec], plan: KVCachePlan, device: torch.device, *, poison: bool = False
) -> KVCache:
    """Allocate the pool; with ``poison`` as NaN, so that reading what was never written shows.

    Host memory is zeroed lazily by the system, so a large pool costs nothing until it is used.
    """
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer in layers:
        shape = (plan.num_blocks, plan.block_size, layer.num_kv_heads, layer.head_dim)
        for tensors in (keys, values):
            tensor = torch.zeros(shape, dtype=layer.dtype, device=device)
            tensors.append(tensor.fill_(float("nan")) if poison else tensor)
    return KVCache(plan, keys, values)


def free_memory(device: torch.device) -> int:
    """Bytes that may still be allocated on ``device``; host memory minds the cgroup's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    limit, current = (
        _cgroup_bytes(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current")
    )
    if limit is None or current is None:
        return available
    return min(available, limit - current)


def _cgroup_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
