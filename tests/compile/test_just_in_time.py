"""Compiled once, whatever the number of layers, tokens and models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from src.compile.just_in_time import compile_functions


def project(weight: Tensor, x: Tensor) -> Tensor:
    """[T, H] times [H, N]: an external call, so that compiling needs no C++ compiler."""
    return x @ weight


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.inference_mode():
        yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_any_number_of_tokens_and_layers_is_one_graph() -> None:
    (compiled,) = compile_functions([project], [(1,)])
    layers = [torch.randn(4, 6) for _ in range(20)]
    for num_tokens in (8, 1, 2, 3, 64, 1):
        x = torch.randn(num_tokens, 4)
        for weight in layers:
            torch.testing.assert_close(compiled(weight, x), project(weight, x))
    assert graphs() == 1


def test_models_of_one_process_do_not_use_up_each_other_s_limit() -> None:
    limit = torch._dynamo.config.recompile_limit
    for width in range(3, limit + 6):
        (compiled,) = compile_functions([project], [(1,)])
        weight, x = torch.randn(4, width), torch.randn(5, 4)
        torch.testing.assert_close(compiled(weight, x), project(weight, x))
    assert graphs() == limit + 3
