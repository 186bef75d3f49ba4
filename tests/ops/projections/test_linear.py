"""The streaming projection: every kind of weights, and results that no batch can change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.ops.projections.linear import LINEAR, Linear
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import (
    keeping_one_way,
    linear_is_alike_in_any_company,
    some_tokens,
)

KINDS = (
    *("same", "int8", "int4/32", "int4/128", "int8/16", "int8/64", "float8", "float8/64"),
    *("int4/32 with offsets", "int4/128 with bfloat16 offsets", "int8/16 with offsets"),
)
PAIRED = ("avx512_bf16", "amx")
"""Levels that multiply pairs of bfloat16, and so have weights of groups rounded to it."""


def assert_matches(got: torch.Tensor, args: tuple[Any, ...], rounds_groups: bool = False) -> None:
    """Against float64; what differs is the rounding of sums, and of the result once.

    ``rounds_groups``: and of weights in groups, to bfloat16, where tokens are of that.
    """
    x, weight, bias = Linear.of_flat(*args)
    matrix, in_groups = weight.dequantized(), weight.encoding.group is not None
    if rounds_groups and in_groups and x.dtype == torch.bfloat16:
        matrix = matrix.bfloat16()
    matrix = matrix.double()
    expected = x.double() @ matrix.T + (0 if bias is None else bias.double())
    relative = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[x.dtype]
    largest = x.double().abs() @ matrix.T.abs() + 1
    assert ((got.double() - expected).abs() <= relative * expected.abs() + 1e-5 * largest).all()


@pytest.mark.parametrize("weight", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_float64(
    libraries: dict[str, KernelLibrary], dtype: torch.dtype, weight: str
) -> None:
    cases = [(1, 128, 5), (3, 256, 4), (8, 128, 33), (13, 384, 30), (100, 1024, 9)]
    for tokens, inputs, outputs in cases:
        args = LINEAR.build(
            "cpu",
            tokens=tokens,
            inputs=inputs,
            outputs=outputs,
            dtype=dtype,
            weight=weight,
            has_bias=True,
        )
        for name, library in libraries.items():
            assert_matches(library.streamed_linear(*args), args, name in PAIRED)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_token_is_the_same_bits_in_any_company(
    libraries: dict[str, KernelLibrary], data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(1, 120))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    inputs = data.draw(st.sampled_from([5, 50, 128, 129, 1024]))
    args = LINEAR.build(
        "cpu",
        tokens=tokens,
        inputs=inputs,
        outputs=data.draw(st.integers(1, 40)),
        dtype=dtype,
        # Quantized rows are whole groups.
        weight=data.draw(st.sampled_from(KINDS if inputs % 128 == 0 else KINDS[:1])),
        has_bias=data.draw(st.booleans()),
    )
    with keeping_one_way(libraries.values()):
        linear_is_alike_in_any_company(libraries.values(), args, *some_tokens(data, tokens))


def test_rows_may_lie_apart_and_there_may_be_none(libraries: dict[str, KernelLibrary]) -> None:
    x, weight, *rest = LINEAR.build("cpu", tokens=6, inputs=192, outputs=8, weight="int8")
    for library in libraries.values():
        whole = library.streamed_linear(x, weight, *rest)
        assert torch.equal(
            library.streamed_linear(x[:, :128], weight[:, :128].contiguous(), *rest),
            (library.streamed_linear(x[:, :128].contiguous(), weight[:, :128].contiguous(), *rest)),
        )
        assert torch.equal(library.streamed_linear(x[::2], weight, *rest), whole[::2])
        assert library.streamed_linear(x[:0], weight, *rest).shape == (0, 8)


def test_one_bad_token_stays_its_own(library: KernelLibrary) -> None:
    x, *rest = LINEAR.build("cpu", tokens=9, inputs=128, outputs=16)
    expected = library.streamed_linear(x, *rest)
    x[4] = torch.nan
    got = library.streamed_linear(x, *rest)
    assert got[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(got[others], expected[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [1, 7, 50, 129])
def test_rows_of_any_length_are_summed(
    libraries: dict[str, KernelLibrary], inputs: int, dtype: torch.dtype
) -> None:
    for tokens in (1, 3, 40):
        args = LINEAR.build(
            "cpu", tokens=tokens, inputs=inputs, outputs=9, dtype=dtype, has_bias=True
        )
        # What lies behind a row is not read, not even as a product with zero.
        spoilt = torch.full((tokens, inputs + 8), torch.nan, dtype=dtype)
        spoilt[:, :inputs] = args[0]
        for library in libraries.values():
            assert_matches(library.streamed_linear(spoilt[:, :inputs], *args[1:]), args)


def test_what_does_not_fit_is_refused(library: KernelLibrary) -> None:
    x, weight, *rest = LINEAR.build("cpu", tokens=3, inputs=64, outputs=7)
    with pytest.raises(ValueError, match="in that dtype if without scales"):
        library.streamed_linear(x.bfloat16(), weight, *rest)
    with pytest.raises(ValueError, match="contiguous"):
        library.streamed_linear(x, weight.T.contiguous().T, *rest)
    # The kernel reads so many inputs, rows and numbers of the bias.
    for others in (
        (weight[:, :48].contiguous(), None, None, 0, None),
        (weight[None], None, None, 0, None),
        (weight[0], None, None, 0, None),
        (weight, None, None, 0, torch.ones(6)),
        (weight, None, None, 0, torch.ones(7, 1)),
        (weight, None, torch.ones(7, 2), 0, None),
    ):
        with pytest.raises(ValueError, match="expected"):
            library.streamed_linear(x, *others)
    for kind in (8, 99):
        with pytest.raises(
            ValueError, match=rf"no matrix of kind {kind} has values of torch\.float32"
        ):
            library.streamed_linear(x, weight, None, None, kind, None)
