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
from src.engine.devices import give_back_memory
from src.models import LayerKVSpec
from src.ops.host_memory import lazy_zeros

logger = logging.getLogger(__name__)

_DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}
_DEFAULT_FRACTION = {"cpu": 0.25, "cuda": 0.9}
# What the default leaves for activations, logits and sampling, unless that is over half of what is
# free: on a large GPU a tenth is more than this, on a small one a tenth is too little.
_CUDA_RESERVE = 2 * GIB
# Per version of cgroups: limit, use, and what in memory.stat names the part of the use that is
# page cache which the system gives back when asked.
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


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
    reserved_bytes: int = 0,
) -> tuple[KVCachePlan, int]:
    """Choose the number of blocks; returns the plan and the context length that it allows.

    Where nobody said how large, the pool is no larger than ``max_num_seqs`` sequences of
    ``max_model_len`` tokens can use; who says so also has room for the prefix cache beyond that. A
    context length that the user did not fix is lowered to what fits.

    Parameters
    ----------
    reserved_bytes
        Of what is free now, that something else will take.

    Raises
    ------
    ConfigError
        When not even one block fits, or a fixed ``max_model_len`` does not.
    """
    block_size = block_size_of(section, device)
    bytes_per_block = block_size * sum(
        2 * layer.num_kv_heads * layer.head_dim * layer.dtype.itemsize for layer in layers
    )
    free = max(0, free_memory(device) - reserved_bytes)
    budget = section.memory_bytes or _budget(section, device.type, free)
    num_blocks = section.num_blocks or budget // bytes_per_block
    if section.num_blocks is section.memory_bytes is section.memory_fraction is None:
        num_blocks = min(num_blocks, max_num_seqs * -(-max_model_len // block_size))
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
    if device.type == "cpu" and plan.total_bytes > free:
        # Given as it is touched: nothing else tells before it is too late.
        logger.warning(
            "KV memory of %.2f GiB is more than the %.2f GiB that are free: when it is used, the "
            "system may end this process",
            plan.total_bytes / GIB,
            free / GIB,
        )
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


def block_size_of(section: CacheSection, device: torch.device) -> int:
    """Tokens of a block."""
    return section.block_size or _DEFAULT_BLOCK_SIZE[device.type]


def allocate_kv_cache(
    layers: Sequence[LayerKVSpec], plan: KVCachePlan, device: torch.device, *, poison: bool = False
) -> KVCache:
    """Allocate the pool; with ``poison`` as NaN, so that reading what was never written shows.

    Host memory is given by the system as it is touched, so a large pool costs nothing until then.
    """
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer in layers:
        shape = (plan.num_blocks, plan.block_size, layer.num_kv_heads, layer.head_dim)
        for tensors in (keys, values):
            if device.type == "cpu":
                tensor = lazy_zeros(shape, layer.dtype)
            else:
                tensor = torch.zeros(shape, dtype=layer.dtype, device=device)
            tensors.append(tensor.fill_(float("nan")) if poison else tensor)
    return KVCache(plan, keys, values)


def _budget(section: CacheSection, device_type: str, free: int) -> int:
    """Bytes of KV memory where they are a part of what is free."""
    if section.memory_fraction is not None:
        return int(section.memory_fraction * free)
    share = int(_DEFAULT_FRACTION[device_type] * free)
    return min(share, max(free - _CUDA_RESERVE, free // 2)) if device_type == "cuda" else share


def free_memory(
    device: torch.device,
    *,
    cgroup: Path = Path("/sys/fs/cgroup"),
    meminfo: Path = Path("/proc/meminfo"),
) -> int:
    """Bytes that may still be allocated on ``device``, at least 0.

    Host memory minds the limit of the cgroup (version 2 or 1), in which files that were read count
    as used: those that are not in active use do not count here.
    """
    if device.type == "cuda":
        # What torch keeps of tensors that are gone is free for those to come.
        give_back_memory(device.type)
        return torch.cuda.mem_get_info(device)[0]
    # Lines like "MemAvailable:   24576 kB".
    host = {
        name: 1024 * int(value.split()[0])
        for name, value in (line.split(":") for line in meminfo.read_text().splitlines())
    }
    available = host["MemAvailable"]
    for limit_name, used_name, stat_name, reclaimable_name in _CGROUPS:
        limit, used = _number(cgroup / limit_name), _number(cgroup / used_name)
        # Version 1 says "no limit" with a number over what any machine has.
        if limit is not None and used is not None and limit <= host["MemTotal"]:
            reclaimable = _statistic(cgroup / stat_name, reclaimable_name)
            available = min(available, limit - used + reclaimable)
    return max(0, available)


def _number(path: Path) -> int | None:
    """The number in a cgroup's file; ``None`` where there is no such file, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _statistic(path: Path, name: str) -> int:
    """One line of a cgroup's statistics, 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
