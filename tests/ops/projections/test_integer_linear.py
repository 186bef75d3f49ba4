"""Quantized weights in strips: inputs are rounded, products are integers, and no more changes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.ops.build.levels import LEVELS, cpu_flags
from src.ops.matrix import STRIP, Tiling, to_quantized_strips
from src.ops.projections.linear import LINEAR, Linear, round_inputs
from src.ops.runtime.abi import LinearArgs
from src.ops.runtime.kernel_library import KernelLibrary
from src.ops.runtime.packing import bind
from src.ops.runtime.way_calls import LibraryWays
from tests.ops.comparison import (
    linear_is_alike_in_any_company,
    some_tokens,
)

KINDS = (
    *("int8", "int4/32", "int4/64", "int4/96", "int4/384"),
    *("int8/16", "int8/32", "int8/128", "int8/384", "int8/16 with offsets"),
    *("int4/32 with offsets", "int4/64 with offsets", "int4/384 with offsets"),
    *("int4/32 with bfloat16 offsets", "int8/384 with bfloat16 offsets"),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MACHINE = cpu_flags()
TILES_INT8 = 9


@pytest.fixture(autouse=True, scope="module")
def _inputs_are_rounded(
    libraries: dict[str, KernelLibrary], request: pytest.FixtureRequest
) -> Iterator[None]:
    """For any number of tokens, though another way may be faster for many."""
    emulated: dict[str, ctypes.CDLL] = {}
    if LEVELS[1].needs <= MACHINE:
        emulated = request.getfixturevalue("emulated_linears")
    ways = [
        *(library.ways for library in libraries.values()),
        *(LibraryWays(library) for library in emulated.values()),
    ]
    with contextlib.ExitStack() as kept:
        for each in ways:
            kept.enter_context(each.keeping_one())
        yield


def build(kind: str, **sizes: Any) -> tuple[Any, ...]:
    if kind != "int8":
        # Whole strips, as int4 needs them.
        sizes["outputs"] = -(-sizes["outputs"] // STRIP) * STRIP
    return LINEAR.build("cpu", weight=f"strips of {kind}", **sizes)


def assert_matches(got: torch.Tensor, args: tuple[Any, ...]) -> None:
    """Against float64 of the rounded inputs; what differs is the rounding of float32 and once."""
    x, held, bias = Linear.of_flat(*args)
    rounded = round_inputs(x, held.rounding_unit).double()
    matrix = held.dequantized().double()
    expected = rounded @ matrix.T + (0 if bias is None else bias.double())
    relative = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[x.dtype]
    largest = rounded.abs() @ matrix.T.abs() + 1
    assert ((got.double() - expected).abs() <= relative * expected.abs() + 1e-5 * largest).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_those_of_float64(
    libraries: dict[str, KernelLibrary], dtype: torch.dtype, kind: str
) -> None:
    cases = [(1, 5), (2, 64), (5, 130), (6, 64), (7, 200), (13, 64), (100, 65)]
    # Rows of several chunks too.
    sizes = [*((*case, 384) for case in cases), (1, 64, 2304), (2, 64, 2304), (9, 70, 2304)]
    for tokens, outputs, inputs in sizes:
        args = build(
            kind, tokens=tokens, inputs=inputs, outputs=outputs, dtype=dtype, has_bias=tokens > 1
        )
        for library in libraries.values():
            assert_matches(library.streamed_linear(*args), args)
        assert_matches(LINEAR.reference(*args), args)


@pytest.mark.skipif(not LEVELS[1].needs <= MACHINE, reason="the emulation is compiled for AVX2")
@pytest.mark.parametrize("kind", KINDS)
def test_emulated_instructions_give_the_same(
    emulated_linears: dict[str, ctypes.CDLL], kind: str
) -> None:
    """As a CPU that has them runs it, wherever this runs."""
    sizes = [
        (1, 64, 384),
        (2, 70, 1152),
        (4, 130, 384),
        (6, 65, 384),
        (20, 70, 1152),
        (50, 65, 384),
    ]
    for tokens, outputs, inputs in sizes:
        for dtype in DTYPES:
            args = build(kind, tokens=tokens, inputs=inputs, outputs=outputs, dtype=dtype)
            for library in emulated_linears.values():
                emulated = bind(library.slipstream_linear, LinearArgs)
                got = emulated(*args)
                assert_matches(got, args)
                assert torch.equal(emulated(args[0][-1:], *args[1:]), got[-1:])


@pytest.mark.skipif(not LEVELS[1].needs <= MACHINE, reason="the emulation is compiled for AVX2")
@pytest.mark.parametrize("kind", ["int8", "int8/32 with offsets", "int4/32", "int4/64"])
def test_the_largest_weights_and_inputs_overflow_nothing(
    libraries: dict[str, KernelLibrary], emulated_linears: dict[str, ctypes.CDLL], kind: str
) -> None:
    """All of them at the ends of their ranges, in every combination of signs."""
    for sign in (1, -1):
        for nibbles in (0x00, 0xFF):
            x, weight, *rest = build(kind, tokens=7, inputs=384, outputs=64)
            args = (torch.full_like(x, sign * 3.0), weight, *rest)
            weight.fill_(nibbles if weight.dtype == torch.uint8 else (-1 if nibbles else 0))
            for linear in (
                *(library.streamed_linear for library in libraries.values()),
                *(bind(each.slipstream_linear, LinearArgs) for each in emulated_linears.values()),
            ):
                assert_matches(linear(*args), args)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_token_is_the_same_bits_in_any_company(
    libraries: dict[str, KernelLibrary], data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(1, 60))
    args = build(
        data.draw(st.sampled_from(KINDS)),
        tokens=tokens,
        inputs=data.draw(st.sampled_from([384, 1152])),
        outputs=data.draw(st.integers(1, 200)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        has_bias=data.draw(st.booleans()),
    )
    linear_is_alike_in_any_company(libraries.values(), args, *some_tokens(data, tokens))


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.integers(1, 200),
    units=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 100),
)
def test_strips_stand_for_the_same_matrix(outputs: int, units: int, kind: str, seed: int) -> None:
    if kind != "int8":
        outputs = -(-outputs // STRIP) * STRIP
    sizes = {"tokens": 1, "inputs": units * 384, "outputs": outputs}
    matrix = Linear.of_flat(*LINEAR.build("cpu", **sizes, weight=kind, seed=seed)).weight
    tiles = matrix.tiled()
    assert tiles.tiling is Tiling.TILES
    assert (tiles.outputs, tiles.inputs) == (matrix.outputs, matrix.inputs)
    assert torch.equal(tiles.dequantized(), matrix.dequantized())


def test_what_cannot_be_cut_into_strips_is_refused(library: KernelLibrary) -> None:
    _, weight, scales, *_ = LINEAR.build("cpu", tokens=1, inputs=96, outputs=64, weight="int8")
    with pytest.raises(ValueError, match="cannot be cut into strips"):
        to_quantized_strips(weight, scales)
    _, weight, scales, *_ = LINEAR.build("cpu", tokens=1, inputs=96, outputs=65, weight="int4/32")
    with pytest.raises(ValueError, match="cannot be cut into strips"):
        to_quantized_strips(weight, scales)
    with pytest.raises(ValueError, match="a multiple of 64 inputs"):
        round_inputs(torch.ones(1, 96), 64)
    x = torch.ones(1, 96, dtype=torch.bfloat16)
    laid_out = torch.zeros(1, 24, 256, dtype=torch.int8)
    with pytest.raises(ValueError, match="in strips a multiple of 64"):
        library.streamed_linear(x, laid_out, torch.ones(64), None, TILES_INT8, None)
    with pytest.raises(ValueError, match="expected weights in strips"):
        library.streamed_linear(torch.ones(1, 96), laid_out, torch.ones(65), None, TILES_INT8, None)
    _, weight, scales, *_ = LINEAR.build("cpu", tokens=1, inputs=128, outputs=65, weight="int8/32")
    with pytest.raises(ValueError, match="cannot be cut into strips"):
        to_quantized_strips(weight, scales)
    x, weight, scales, offsets, *rest = build(
        "int4/32 with offsets", tokens=1, inputs=384, outputs=64
    )
    for wrong in (offsets.bfloat16(), offsets[:, :1]):
        with pytest.raises(ValueError, match="offsets of the shape"):
            library.streamed_linear(x, weight, scales, wrong, *rest)
    with pytest.raises(ValueError, match="no strips are of"):
        library.streamed_linear(torch.ones(1, 96), laid_out, None, None, TILES_INT8, None)


def test_the_unit_is_that_of_the_weights_or_less() -> None:
    for kind, unit in (
        *(("int8", 64), ("int4/32", 32), ("int4/64", 64), ("int4/96", 32)),
        *(("int8/16", 16), ("int8/48", 16), ("int8/32", 32), ("int8/128", 64)),
    ):
        call = Linear.of_flat(*build(kind, tokens=1, inputs=384, outputs=64))
        assert call.weight.rounding_unit == unit
    call = Linear.of_flat(*build("int4/384", tokens=1, inputs=384, outputs=64))
    assert call.weight.rounding_unit == 64


def test_few_strips_and_many_threads_have_tokens_cut(libraries: dict[str, KernelLibrary]) -> None:
    args = build("int8", tokens=150, inputs=128, outputs=64, dtype=torch.bfloat16)
    for library in libraries.values():
        library.assume_wake_cost(0.1)
        try:
            torch.set_num_threads(3)
            assert_matches(library.streamed_linear(*args), args)
        finally:
            library.assume_wake_cost()


@settings(max_examples=80, deadline=None)
@given(
    exponent=st.sampled_from([-130, -101, -99, -20, 0, 60, 110]),
    outlier=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_no_input_moves_further_than_half_a_step(exponent: int, outlier: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(3, 256, generator=generator) * 2.0**exponent).bfloat16()
    if outlier:
        x[1, 7] *= 100
    rounded = round_inputs(x, 64)
    largest = x.float().view(3, 4, 64).abs().amax(dim=2, keepdim=True)
    # Of the smallest numbers nothing is left.
    most = torch.where(largest < 2.0**-100, largest, largest / 254 * (1 + 1e-5))
    assert ((rounded - x.float()).view(3, 4, 64).abs() <= most).all()


def test_one_bad_token_stays_its_own_and_shows(libraries: dict[str, KernelLibrary]) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for kind in ("int8", "int4/32", "int8/16 with offsets", "int4/64 with offsets"):
            x, *rest = build(kind, tokens=9, inputs=128, outputs=64, dtype=torch.bfloat16)
            for library in libraries.values():
                expected = library.streamed_linear(x, *rest)
                spoilt = x.clone()
                spoilt[4, 77] = bad
                got = library.streamed_linear(spoilt, *rest)
                assert got[4].isnan().all()
                others = [0, 1, 2, 3, 5, 6, 7, 8]
                assert torch.equal(got[others], expected[others])


def test_zeros_stay_zeros_and_rows_may_lie_apart(libraries: dict[str, KernelLibrary]) -> None:
    x, *rest = build("int8", tokens=6, inputs=256, outputs=70, dtype=torch.bfloat16)
    for library in libraries.values():
        whole = library.streamed_linear(x, *rest)
        assert torch.equal(library.streamed_linear(x[::2], *rest), whole[::2])
        wide = torch.cat((x, x), dim=1)
        assert torch.equal(library.streamed_linear(wide[:, :256], *rest), whole)
        nothing = library.streamed_linear(torch.zeros_like(x), *rest)
        assert torch.equal(nothing, torch.zeros_like(nothing))
        assert library.streamed_linear(x[:0], *rest).shape == (0, 70)
