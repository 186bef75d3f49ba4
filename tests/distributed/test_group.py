from __future__ import annotations

import pytest
import torch

from src.distributed import Group


def test_a_group_of_one_keeps_everything() -> None:
    group, tensor = Group(), torch.randn(3, 4)
    assert group.all_reduce(tensor) is tensor
    assert group.shard(12) == 12
    assert hash(group) == hash(Group())


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 1), (0, 0)])
def test_other_sizes_are_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=rf"got rank={rank}, size={size}"):
        Group(rank=rank, size=size)
