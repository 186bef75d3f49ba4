from __future__ import annotations

import pytest
import torch

from src.distributed import Group


def test_a_group_of_one_keeps_everything() -> None:
    group, tensor = Group(), torch.randn(3, 4)
    assert group.all_reduce(tensor) is tensor
    assert group.shard(12) == 12
    assert hash(group) == hash(Group())


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (1, 1), (0, 0), (-1, 2), (0, -1)])
def test_a_rank_that_is_not_of_the_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not of a group of {size}"):
        Group(rank, size)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_has_its_share_of_what_divides(rank: int) -> None:
    group = Group(rank, 3)
    assert group.shard(12) == 4
    with pytest.raises(ValueError, match="a dimension of 14 cannot be divided among 3 ranks"):
        group.shard(14)


def test_several_ranks_cannot_compute_yet() -> None:
    with pytest.raises(NotImplementedError, match="a group of 2 ranks cannot compute yet"):
        Group(1, 2).all_reduce(torch.zeros(1))
