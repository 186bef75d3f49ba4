"""Which rows of latent attention are expanded: the rule, a GPU's plan, and the CPU's kernel."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from src.ops import LATENT_ATTENTION
from src.ops.attention.latent_expansion import (
    FEWEST_ON_GPU,
    LatentShape,
    is_expanded,
    plan_expansion,
)
from src.ops.runtime.kernel_library import KernelLibrary

DEEPSEEK_V3 = LatentShape(nope=128, rope=64, rank=512, value=128)


def expanded(queries: int, keys: int, shape: LatentShape, fewest: int = 1) -> bool:
    return bool(is_expanded(np.array([queries]), np.array([keys]), shape, fewest)[0])


def products(queries: int, keys: int, shape: LatentShape) -> tuple[int, int]:
    """Of the expanded and of the absorbed way, counted pair by pair."""
    nope, rope, rank, value = shape
    wide = -(-max(nope + rope, value) // 8) * 8
    pairs = sum(range(keys - queries + 1, keys + 1))
    projection = rank * (nope + value)
    return (
        keys * projection + pairs * 2 * wide,
        queries * projection + pairs * 2 * (rank + rope),
    )


def test_a_row_takes_the_way_of_fewer_products() -> None:
    chance = random.Random(0)
    for _ in range(300):
        shape = LatentShape(*(8 * chance.randint(1, 20) for _ in range(4)))
        keys = chance.randint(1, 300)
        queries = chance.randint(1, keys)
        one, other = products(queries, keys, shape)
        assert expanded(queries, keys, shape) == (one < other)


def test_few_queries_of_a_long_context_are_absorbed() -> None:
    for keys in (10_000, 100_000):
        assert [expanded(queries, keys, DEEPSEEK_V3) for queries in (1, 165, 180)] == [
            *(False, False, True)
        ]
    # A prompt of its own projects as often either way.
    assert expanded(2, 2, DEEPSEEK_V3)
    assert not expanded(FEWEST_ON_GPU - 1, FEWEST_ON_GPU - 1, DEEPSEEK_V3, FEWEST_ON_GPU)
    assert expanded(FEWEST_ON_GPU, FEWEST_ON_GPU, DEEPSEEK_V3, FEWEST_ON_GPU)


def test_a_plan_counts_keys_by_row_and_marks_tokens() -> None:
    queries, keys = np.array([1, 40, 0, 3, 33]), np.array([900, 40, 7, 3, 50])
    plan = plan_expansion(queries, keys, LatentShape(16, 8, 32, 16))
    assert plan is not None
    assert plan.keys == 90
    before, marks = plan.plan[:6], plan.plan[6:]
    assert plan.plan.dtype == np.int32
    assert before.tolist() == [0, 0, 40, 40, 40, 90]
    assert marks.tolist() == [0] + [1] * 40 + [0] * 3 + [1] * 33


def test_only_steps_that_expand_or_warm_up_have_a_plan() -> None:
    assert plan_expansion(np.array([1, 3]), np.array([900, 3]), DEEPSEEK_V3) is None
    nothing = np.zeros(1, np.int64)
    empty = plan_expansion(nothing, nothing, DEEPSEEK_V3)
    assert empty is not None
    assert (empty.plan.tolist(), empty.keys) == ([0, 0], 0)


@pytest.mark.parametrize("shape", [LatentShape(16, 8, 48, 24), LatentShape(24, 16, 64, 8)])
def test_the_kernel_of_the_cpu_follows_the_same_rule(
    library: KernelLibrary, shape: LatentShape
) -> None:
    """Around the number of queries from which expansion pays.

    Expanded keys of these numbers are too large for float16; queries and vectors are not.
    """
    torch.set_num_threads(1)
    for keys in (130, 400):
        fewest = next(count for count in range(1, keys) if expanded(count, keys, shape))
        for queries in (fewest - 1, fewest):
            case = {"rows": ((queries, keys),), "heads": 3, "dtype": torch.float16}
            args = LATENT_ATTENTION.build("cpu", **case, **shape._asdict())
            query, latent, cache, up = args[:4]
            query.mul_(1e-3)
            latent.mul_(1e3)
            cache.mul_(1e3)
            up[:, : shape.nope].mul_(1e3)
            library.latent_attention(*args)
            assert bool(args[8].isfinite().all()) == (queries < fewest)
