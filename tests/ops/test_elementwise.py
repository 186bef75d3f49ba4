"""Elementwise functions by token, against each token alone: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch.nn import functional

from src.ops.elementwise import by_token
from tests.ops.comparison import bits

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "softplus": functional.softplus,
}
# A column, less and more than two vectors, their multiples, and rows that threads would share.
WIDTHS = (1, 2, 8, 31, 33, 64, 1000, 8000, 33001)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def alone(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    torch.set_num_threads(1)
    return torch.cat([by_token(function, row[None]) for row in x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_token_has_the_same_bits_in_any_company(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    for width in WIDTHS:
        tokens = max(3, min(301, 70_000 // width))
        random = torch.Generator().manual_seed(width)
        whole = (torch.randn(tokens, 2 * width, generator=random) * 3).to(dtype)
        # A tensor of its own, and slices of a projection's result.
        for x in (whole[:, :width].clone(), whole[:, :width], whole[:, width:]):
            expected = alone(function, x)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                for part in (slice(0, tokens), slice(1, tokens), slice(tokens // 2, tokens)):
                    got = by_token(function, x[part])
                    assert torch.equal(bits(got), bits(expected[part])), (width, threads, part)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_function_stays_itself(name: str) -> None:
    x = torch.randn(40, 33, generator=torch.Generator().manual_seed(0)) * 3
    got = by_token(FUNCTIONS[name], x)
    assert got.shape == x.shape
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    # Each is x, or 1, times a number below 1 that is right to 1.5e-7 (the erf of A&S 7.1.26), and
    # rounded a few times.
    error = (got.double() - FUNCTIONS[name](x.double())).abs()
    assert (error <= 4 * torch.finfo(x.dtype).eps * x.abs().clamp(min=1)).all()
    assert by_token(FUNCTIONS[name], x[:0]).shape == (0, 33)
