"""Sums of hidden states over the steps in which they are computed."""

from __future__ import annotations

import random

import pytest
import torch

from src.engine.execution.pooling import GROUP, add_in_order


@pytest.mark.parametrize("length", [1, GROUP - 1, GROUP, GROUP + 1, 5 * GROUP, 333])
def test_a_sum_in_order_has_the_same_bits_in_any_pieces(length: int) -> None:
    torch.manual_seed(length)
    values = torch.randn(length, 48) * torch.logspace(-4, 4, length)[:, None]
    want = torch.zeros(48)
    for begin in range(0, length, GROUP):
        part = torch.zeros(48)
        for value in values[begin : begin + GROUP]:
            part += value
        want += part
    source = random.Random(length)
    for longest in (1, 2, 7, GROUP, 100, length):
        total, group, start = torch.zeros(48), torch.zeros(48), 0
        while start < length:
            count = min(source.randint(1, longest), length - start)
            add_in_order(total, group, start, values[start : start + count])
            start += count
        assert torch.equal(total + group, want), longest
    torch.testing.assert_close(want.double(), values.double().sum(0), rtol=1e-4, atol=0.1)
