"""bfloat16 weights in strips: the same sums as of rows, whatever a token's company and the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.ops.build.levels import LEVELS, cpu_flags, fastest_level
from src.ops.matrix import fits_strips, to_strips
from src.ops.projections.linear import LINEAR, Linear
from src.ops.runtime.abi import LinearArgs
from src.ops.runtime.kernel_library import KernelLibrary
from src.ops.runtime.packing import bind
from tests.ops.comparison import (
    bits,
    linear_is_alike_in_any_company,
    some_tokens,
)

MACHINE = cpu_flags()
ROWS, TILES = 1, 17  # kinds of bfloat16


def build(seed: int = 0, **sizes: Any) -> tuple[torch.Tensor, ...]:
    """x, weights in rows, weights in strips, bias."""
    call = Linear.of_flat(*LINEAR.build("cpu", dtype=torch.bfloat16, seed=seed, **sizes))
    rows = call.weight.values
    return call.x, rows, to_strips(rows), call.bias


def assert_matches(
    got: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Against float64; what differs is the rounding of float32, and to bfloat16 once."""
    expected = x.double() @ rows.double().T + (0 if bias is None else bias.double())
    largest = x.double().abs() @ rows.double().T.abs() + 1
    assert ((got.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * largest).all()


@pytest.mark.parametrize("has_bias", [True, False])
def test_sums_are_those_of_float64(libraries: dict[str, KernelLibrary], has_bias: bool) -> None:
    cases = [(1, 2, 64), (2, 64, 128), (3, 66, 64), (5, 202, 128), (6, 128, 64), (7, 384, 192)]
    for tokens, inputs, outputs in [*cases, (13, 1024, 64), (300, 704, 64)]:
        x, rows, strips, bias = build(
            tokens=tokens, inputs=inputs, outputs=outputs, has_bias=has_bias
        )
        for library in libraries.values():
            assert_matches(
                library.streamed_linear(x, strips, None, None, TILES, bias), x, rows, bias
            )
        assert torch.equal(
            LINEAR.reference(x, strips, None, None, TILES, bias),
            LINEAR.reference(x, rows, None, None, ROWS, bias),
        )


@pytest.mark.skipif(not LEVELS[1].needs <= MACHINE, reason="the emulation is compiled for AVX2")
def test_emulated_instructions_give_the_same(emulated_linears: dict[str, ctypes.CDLL]) -> None:
    """As a CPU that has them runs it, wherever this runs."""
    cases = [(1, 64, 64), (2, 600, 64), (4, 130, 128), (6, 62, 64), (20, 256, 64)]
    for tokens, inputs, outputs in cases:
        x, rows, strips, bias = build(tokens=tokens, inputs=inputs, outputs=outputs, has_bias=True)
        for library in emulated_linears.values():
            emulated = bind(library.slipstream_linear, LinearArgs)
            got = emulated(x, strips, None, None, TILES, bias)
            assert_matches(got, x, rows, bias)
            assert torch.equal(emulated(x[-1:], strips, None, None, TILES, bias), got[-1:])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_token_is_the_same_bits_in_any_company(
    libraries: dict[str, KernelLibrary], data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(1, 60))
    x, _, strips, bias = build(
        tokens=tokens,
        inputs=2 * data.draw(st.integers(1, 300)),
        outputs=64 * data.draw(st.integers(1, 4)),
        has_bias=data.draw(st.booleans()),
    )
    args = (x, strips, None, None, TILES, bias)
    linear_is_alike_in_any_company(libraries.values(), args, *some_tokens(data, tokens))


def test_tokens_that_do_not_stay_close_to_a_core_are_cut(
    libraries: dict[str, KernelLibrary],
) -> None:
    x, _, strips, _ = build(tokens=700, inputs=1024, outputs=64)
    linear_is_alike_in_any_company(
        libraries.values(), (x, strips, None, None, TILES, None), slice(650, 661), 2
    )


def test_one_bad_token_stays_its_own_and_rows_may_lie_apart(
    libraries: dict[str, KernelLibrary],
) -> None:
    x, _, strips, _ = build(tokens=9, inputs=128, outputs=64)
    for library in libraries.values():
        expected = library.streamed_linear(x, strips, None, None, TILES, None)
        for bad in (torch.nan, torch.inf):
            spoilt = x.clone()
            spoilt[4] = bad
            got = library.streamed_linear(spoilt, strips, None, None, TILES, None)
            assert not got[4].isfinite().any()
            others = [0, 1, 2, 3, 5, 6, 7, 8]
            assert torch.equal(got[others], expected[others])
        assert torch.equal(
            library.streamed_linear(x[::2], strips, None, None, TILES, None), expected[::2]
        )
        wide = torch.cat((x, torch.full_like(x, torch.nan)), dim=1)
        assert torch.equal(
            library.streamed_linear(wide[:, :128], strips, None, None, TILES, None), expected
        )
        assert library.streamed_linear(x[:0], strips, None, None, TILES, None).shape == (0, 64)


@settings(max_examples=40, deadline=None)
@given(strips=st.integers(1, 5), words=st.integers(1, 150), threads=st.integers(1, 3))
def test_a_library_lays_weights_out_where_they_are(
    libraries: dict[str, KernelLibrary], strips: int, words: int, threads: int
) -> None:
    random = torch.Generator().manual_seed(words)
    values = torch.randint(-(2**15), 2**15, (64 * strips, 2 * words), generator=random)
    weight = values.to(torch.int16).view(torch.bfloat16)
    expected = to_strips(weight)
    torch.set_num_threads(threads)
    for library in libraries.values():
        mine = weight.clone()
        got = library.lay_out(mine)
        assert got.data_ptr() == mine.data_ptr()
        assert got.shape == expected.shape
        assert torch.equal(bits(got), bits(expected))


def test_what_cannot_be_cut_into_strips_is_refused(library: KernelLibrary) -> None:
    for shape, dtype in (
        ((65, 64), torch.bfloat16),
        ((64, 63), torch.bfloat16),
        ((64, 64), torch.float32),
        ((64, 64), torch.float16),
    ):
        weight = torch.zeros(shape, dtype=dtype)
        assert not fits_strips(weight)
        for lay_out in (to_strips, library.lay_out):
            with pytest.raises(ValueError, match="cannot be cut into strips"):
                lay_out(weight)
    with pytest.raises(ValueError, match="cannot be cut"):
        library.lay_out(torch.zeros(64, 128, dtype=torch.bfloat16)[:, :64])
    x, strips = torch.ones(1, 64, dtype=torch.bfloat16), torch.zeros(1, 32, 128).bfloat16()
    with pytest.raises(ValueError, match=r"weight \[outputs, inputs\].* got x \(1, 62\)"):
        library.streamed_linear(x[:, :62], strips, None, None, TILES, None)
    with pytest.raises(ValueError, match="weights of bfloat16 have no scales"):
        library.streamed_linear(x, strips, torch.ones(64), None, TILES, None)
    with pytest.raises(ValueError, match=r"no matrix of kind 17 has values of torch\.float32"):
        library.streamed_linear(x.float(), strips.float(), None, None, TILES, None)
    with pytest.raises(ValueError, match="in that dtype if without scales"):
        library.streamed_linear(x.half(), strips, None, None, TILES, None)


def test_what_levels_gain_by() -> None:
    """Names of levels, by the flags of a CPU: pairs in strips, products of bytes."""
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    vnni, pairs, tiles = {"avx512_vnni"}, {"avx512_bf16"}, {"amx_tile", "amx_bf16", "amx_int8"}
    for flags, name, pairs_in_strips, multiplies_bytes in (
        (set(), "portable", False, False),
        (avx2, "avx2", True, True),
        (avx2 | {"avx_vnni"}, "avx2_vnni", True, True),
        (avx512, "avx512", False, False),
        (avx512 | pairs, "avx512", False, False),
        (avx512 | vnni, "avx512_vnni", False, True),
        (avx512 | vnni | pairs | {"avx_vnni"}, "avx512_bf16", True, True),
        (avx512 | vnni | pairs | (tiles - {"amx_int8"}), "avx512_bf16", True, True),
        (avx512 | vnni | pairs | tiles, "amx", True, True),
    ):
        level = fastest_level(frozenset(flags))
        assert level.name == name
        assert (level.pairs_in_strips, level.multiplies_bytes) == (
            pairs_in_strips,
            multiplies_bytes,
        )
    assert [level.number for level in LEVELS] == list(range(len(LEVELS)))
