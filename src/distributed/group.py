"""The group of ranks that share one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Group:
    """A set of ranks that each hold a shard of every fused parameter.

    Frozen and hashable, so that a group can be part of the static specification of a compiled
    region. Only groups of one rank exist so far; layers call the collectives all the same, so that
    sharding them later changes no layer.

    Raises:
        ValueError: a size other than 1.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size != 1 or self.rank != 0:
            raise ValueError(
                f"a group has one rank (rank=0, size=1), got rank={self.rank}, size={self.size}"
            )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of `tensor` over the ranks; with one rank, `tensor` itself."""
        return tensor

    def shard(self, size: int) -> int:
        """This rank's share of a dimension of `size` that is split evenly over the ranks."""
        return size // self.size
