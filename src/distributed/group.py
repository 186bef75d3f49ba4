"""The group of ranks that share one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Group:
    """A set of ranks that each hold a shard of every fused parameter.

    Frozen and hashable, so that a group can be part of the static specification of a compiled
    segment. Only groups of one rank can compute so far. Layers call the collectives anyway, so
    that sharding will not change them.

    Raises
    ------
    ValueError
        The rank is not in the group.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not of a group of {self.size}")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of `tensor` over the ranks; with one rank, `tensor` itself.

        Raises
        ------
        NotImplementedError
            There are several ranks, which is not supported yet.
        """
        if self.size > 1:
            raise NotImplementedError(f"a group of {self.size} ranks cannot compute yet")
        return tensor

    def shard(self, size: int) -> int:
        """This rank's share of a dimension of `size` that is split evenly over the ranks.

        Raises
        ------
        ValueError
            ``size`` is not a multiple of the number of ranks.
        """
        if size % self.size:
            raise ValueError(f"a dimension of {size} cannot be divided among {self.size} ranks")
        return size // self.size
