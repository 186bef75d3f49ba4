"""Plain weights and many tokens: sums of another order, the same for any number of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.ops.projections.linear import LINEAR
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import bits, keeping_one_way
from tests.ops.projections.test_linear import assert_matches

FIRST = 28
"""The least number of tokens that has it, as in outer_products.h."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def build(**case: Any) -> tuple[Any, ...]:
    args: tuple[Any, ...] = LINEAR.build("cpu", **({"has_bias": True} | case))
    return args


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_are_those_of_float64(
    libraries: dict[str, KernelLibrary], dtype: torch.dtype, threads: int
) -> None:
    # Partial and whole vectors of tokens, and each number of vectors that ends a row of tiles.
    tokens = itertools.cycle(
        (FIRST - 1, FIRST, FIRST + 1, 32, 33, 47, 48, 49, 64, 65, 80, 100, 131)
    )
    outputs = (1, 5, 6, 7, 8, 9, 12, 13, 16, 29)
    torch.set_num_threads(threads)
    for inputs, count in itertools.product((1, 7, 16, 50, 129), outputs):
        case = {"tokens": next(tokens), "inputs": inputs, "outputs": count, "dtype": dtype}
        args = build(**case, has_bias=count % 2 == 0)
        for library in libraries.values():
            assert_matches(library.streamed_linear(*args), args)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_no_cache_holds_are_several_blocks(
    library: KernelLibrary, dtype: torch.dtype
) -> None:
    args = build(tokens=230, inputs=4100, outputs=19, dtype=dtype)
    torch.set_num_threads(2)
    assert_matches(library.streamed_linear(*args), args)


def test_tokens_may_lie_apart(library: KernelLibrary) -> None:
    for tokens, inputs in ((FIRST, 50), (61, 384)):
        args = build(tokens=tokens, inputs=inputs, outputs=11)
        # What lies behind a row is not read, not even as a product with zero.
        spoilt = torch.full((tokens, inputs + 9), torch.nan)
        spoilt[:, :inputs] = args[0]
        got = library.streamed_linear(spoilt[:, :inputs], *args[1:])
        assert torch.equal(got, library.streamed_linear(*args))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_token_is_the_same_bits_among_any_others_that_are_many(
    libraries: dict[str, KernelLibrary], data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(FIRST, 150))
    inputs = data.draw(st.sampled_from([5, 50, 128, 1500]))
    x, *rest = build(
        tokens=tokens,
        inputs=inputs,
        outputs=data.draw(st.integers(1, 40)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        has_bias=data.draw(st.booleans()),
    )
    first = data.draw(st.integers(0, tokens - FIRST))
    part = slice(first, data.draw(st.integers(first + FIRST, tokens)))
    for library in libraries.values():
        torch.set_num_threads(1)
        whole = library.streamed_linear(x, *rest)
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        assert torch.equal(bits(library.streamed_linear(x[part], *rest)), bits(whole[part]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_few_tokens_and_one_way_have_one_order_and_many_another(
    libraries: dict[str, KernelLibrary], dtype: torch.dtype
) -> None:
    x, *rest = build(tokens=FIRST, inputs=387, outputs=64, dtype=dtype)
    for name, library in libraries.items():
        few = library.streamed_linear(x[1:], *rest)
        many = library.streamed_linear(x, *rest)
        with keeping_one_way([library]):
            alone = [library.streamed_linear(token[None], *rest) for token in x]
            one_way = library.streamed_linear(x, *rest)
        assert torch.equal(torch.cat(alone), one_way)
        assert torch.equal(few, one_way[1:])
        if dtype == torch.float32:
            assert torch.equal(many, one_way) == (name == "portable")


def test_one_bad_token_stays_its_own(library: KernelLibrary) -> None:
    x, *rest = build(tokens=41, inputs=130, outputs=17)
    expected = library.streamed_linear(x, *rest)
    x[18] = torch.nan
    x[40, 129] = torch.inf
    got = library.streamed_linear(x, *rest)
    assert got[18].isnan().all()
    assert got[40].isinf().all()
    others = [i for i in range(41) if i not in (18, 40)]
    assert torch.equal(got[others], expected[others])
