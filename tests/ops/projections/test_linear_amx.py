"""Linear layers by AMX tile products, on a CPU without AMX, its instructions emulated."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.ops.build import levels
from src.ops.build.timed_calls import timed_calls
from src.ops.build.ways import FIRST_ROWS, FORMATS
from src.ops.matrix import Matrix, from_strips
from src.ops.projections.linear import LINEAR
from src.ops.runtime.abi import LinearArgs
from src.ops.runtime.packing import bind
from src.ops.runtime.way_calls import LibraryWays
from tests.ops.projections.test_linear import KINDS, assert_matches

Linear = Callable[..., torch.Tensor]

MACHINE = levels.cpu_flags()
pytestmark = pytest.mark.skipif(
    not levels.LEVELS[1].needs <= MACHINE, reason="the emulation is compiled for AVX2"
)


@pytest.fixture(scope="module")
def linear(emulated_amx: ctypes.CDLL) -> Linear:
    return bind(emulated_amx.slipstream_linear, LinearArgs)


@pytest.fixture
def one_way(emulated_amx: ctypes.CDLL) -> Iterator[None]:
    with LibraryWays(emulated_amx).keeping_one():
        yield


def build_args(**changes: Any) -> tuple[Any, ...]:
    given = {"tokens": 5, "inputs": 96, "outputs": 40, "dtype": torch.bfloat16, "has_bias": True}
    args: tuple[Any, ...] = LINEAR.build("cpu", **(given | changes))
    return args


@contextlib.contextmanager
def at_the_end_of_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A copy behind which nobody may read."""
    size = tensor.numel() * tensor.element_size()
    page = mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    copy = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages * page - size
    )
    copy = copy.view(tensor.shape)
    copy.copy_(tensor)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert libc.mprotect(address + pages * page, page, 0) == 0
    yield copy
    assert libc.mprotect(address + pages * page, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 31, 32, 33, 70])
@pytest.mark.parametrize("tokens", [1, 16, 17, 32, 33, 50])
def test_sums_are_those_of_float64(linear: Linear, tokens: int, outputs: int) -> None:
    for inputs in (32, 160):
        for weight in ("same", "int8", "int4/32"):
            args = build_args(tokens=tokens, inputs=inputs, outputs=outputs, weight=weight)
            assert_matches(linear(*args), args, rounds_groups=True)
            without_bias = (*args[:-1], None)
            assert_matches(linear(*without_bias), without_bias, rounds_groups=True)


def test_more_tokens_than_are_kept_close_to_a_core(linear: Linear) -> None:
    x, *rest = build_args(tokens=200, inputs=2048, outputs=33)
    whole = linear(x, *rest)
    assert_matches(whole, (x, *rest))
    part = linear(x[120:199], *rest)
    assert torch.equal(part.view(torch.int16), whole[120:199].view(torch.int16))


def test_tiles_are_used_where_they_can_be(linear: Linear, emulated_amx: ctypes.CDLL) -> None:
    count = emulated_amx.emulated_products
    count.restype = ctypes.c_int64

    def products(**changes: Any) -> int:
        args = build_args(tokens=33, inputs=64, outputs=40, **changes)
        before: int = count()
        linear(*args)
        return int(count()) - before

    # 32 outputs and 8, by three groups of tokens, by two tiles of inputs.
    for weight in ("same", "int8", "int4/32"):
        assert products(weight=weight) == (2 + 1) * 3 * 2
    assert products(dtype=torch.float32) == products(dtype=torch.float16, weight="int8") == 0


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 31, 40])
def test_nothing_behind_weights_and_biases_is_read(linear: Linear, outputs: int) -> None:
    """They end where memory does, as a checkpoint's last tensor may."""
    for kind in ("same", "int8", "int4/32"):
        args = build_args(tokens=3, outputs=outputs, weight=kind)
        x, weight, *rest, bias = args
        with at_the_end_of_memory(weight) as last_weight, at_the_end_of_memory(bias) as last_bias:
            got = linear(x, last_weight, *rest, last_bias)
            assert torch.equal(got, linear(*args))
            del last_weight, last_bias


@pytest.mark.parametrize("weight", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_no_bfloat16_goes_another_way(
    linear: Linear, dtype: torch.dtype, weight: str
) -> None:
    for tokens in (1, 7):
        args = build_args(tokens=tokens, inputs=128, dtype=dtype, weight=weight)
        assert_matches(linear(*args), args, rounds_groups=True)
    if weight == "same":
        args = build_args(tokens=7, inputs=50, dtype=dtype)
        assert_matches(linear(*args), args)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_token_is_the_same_bits_in_any_company(linear: Linear, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 80))
    x, *rest = build_args(
        tokens=tokens,
        inputs=data.draw(st.sampled_from([32, 64, 96])),
        weight=data.draw(st.sampled_from(["same", "int8", "int4/32"])),
        outputs=data.draw(st.integers(1, 80)),
        has_bias=data.draw(st.booleans()),
    )
    first = data.draw(st.integers(0, tokens - 1))
    last = data.draw(st.integers(first + 1, tokens))
    whole = linear(x, *rest)
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    part = linear(x[first:last], *rest)
    assert torch.equal(part.view(torch.int16), whole[first:last].view(torch.int16))


def test_one_bad_token_stays_its_own_and_so_does_one_bad_output(linear: Linear) -> None:
    x, weight, *rest = build_args(tokens=20)
    expected = linear(x, weight, *rest)
    x[4], weight[9] = torch.nan, torch.inf
    got = linear(x, weight, *rest)
    assert got[4].isnan().all()
    assert not got[:, 9].isfinite().any()
    tokens = [token for token in range(20) if token != 4]
    outputs = [output for output in range(40) if output != 9]
    assert torch.equal(got[tokens][:, outputs], expected[tokens][:, outputs])


def test_nothing_behind_rows_is_read(linear: Linear) -> None:
    x, *rest = build_args(tokens=18)
    expected = linear(x, *rest)
    spoilt = torch.full((18, 96 + 8), torch.nan, dtype=torch.bfloat16)
    spoilt[:, :96] = x
    assert torch.equal(linear(spoilt[:, :96], *rest), expected)
    assert linear(x[:0], *rest).shape == (0, 40)


BYTES = ("int8", "int8/16", "int8/32 with offsets", "int4/32 with bfloat16 offsets", "int4/64")


@pytest.mark.usefixtures("one_way")
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_have_the_same_bits_by_tiles_and_by_products_of_four(
    linear: Linear, emulated_amx: ctypes.CDLL, dtype: torch.dtype, kind: str
) -> None:
    count = emulated_amx.emulated_products
    count.restype = ctypes.c_int64
    for tokens, inputs in ((50, 384), (65, 192)):
        weight = f"strips of {kind}"
        x, *rest = build_args(tokens=tokens, inputs=inputs, outputs=128, dtype=dtype, weight=weight)
        before = int(count())
        whole = linear(x, *rest)
        by_tiles = int(count())
        few = [linear(x[i : i + 7], *rest) for i in range(0, tokens, 7)]
        assert torch.equal(torch.cat(few), whole)
        assert int(count()) == by_tiles > before


# On either side of a tile of tokens, of two, and of a third.
AROUND_TILES = (1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 70)


@pytest.mark.parametrize("has_bias", [True, False])
def test_strips_of_bfloat16_are_tiles_as_they_lie(
    linear: Linear, emulated_amx: ctypes.CDLL, has_bias: bool
) -> None:
    count = emulated_amx.emulated_products
    count.restype = ctypes.c_int64
    for tokens in AROUND_TILES:
        x, weight, _, _, kind, bias = build_args(
            tokens=tokens, outputs=128, weight="strips of same", has_bias=has_bias
        )
        before = int(count())
        whole = linear(x, weight, None, None, kind, bias)
        # Two strips of four tiles, by groups of tokens, by three tiles of inputs.
        assert int(count()) - before == 2 * 4 * -(-tokens // 16) * 3
        plain = Matrix.plain(from_strips(weight))
        rows = (x, plain.values, None, None, plain.kind, bias)
        assert_matches(whole, rows)
        # As of weights in rows: a start changes from these to strips.
        assert torch.equal(linear(*rows), whole)
        alone = [linear(one, weight, None, None, kind, bias) for one in x.split(1)]
        assert torch.equal(torch.cat(alone), whole)


@pytest.mark.parametrize("tokens", [3, 16, 20])
def test_nothing_behind_tokens_in_place_is_read(linear: Linear, tokens: int) -> None:
    x, *rest = build_args(tokens=tokens, outputs=64, weight="strips of same")
    expected = linear(x, *rest)
    with at_the_end_of_memory(x) as last:
        assert torch.equal(linear(last, *rest), expected)
        del last
    apart = torch.full((tokens, 96 + 32), torch.nan, dtype=torch.bfloat16)
    apart[:, :96] = x
    assert torch.equal(linear(apart[:, :96], *rest), expected)


def test_more_tokens_in_strips_than_are_kept_close_to_a_core(linear: Linear) -> None:
    x, *rest = build_args(tokens=300, inputs=4096, outputs=64, weight="strips of same")
    whole = linear(x, *rest)
    torch.set_num_threads(3)
    assert torch.equal(linear(x, *rest), whole)
    assert torch.equal(linear(x[250:], *rest), whole[250:])
    # A call of the same sizes, with other tokens.
    assert torch.equal(linear(x.flip(0), *rest), whole.flip(0))


def test_more_results_than_caches_hold(linear: Linear) -> None:
    """They are written past the caches, other ones are not."""
    x, *rest = build_args(tokens=300, inputs=64, outputs=3520, weight="strips of same")
    parts = [linear(some, *rest) for some in x.split(96)]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(linear(x, *rest), torch.cat(parts))


SPREAD = (
    *("int8/16", "int8/32 with offsets", "int8/48", "int4/32 with bfloat16 offsets"),
    *("int4/64", "int4/96"),
)


@pytest.mark.parametrize("kind", SPREAD)
def test_many_tokens_meet_the_weights_as_bfloat16(
    linear: Linear, emulated_amx: ctypes.CDLL, kind: str
) -> None:
    """Without rounding the tokens; where one way is kept they are rounded as always."""
    for tokens in (127, 128, 150):
        x, weight, scales, offsets, number, bias = build_args(
            tokens=tokens, inputs=192, outputs=128, weight=f"strips of {kind}"
        )
        rest = (weight, scales, offsets, number, bias)
        got = linear(x, *rest)
        held = Matrix.of_kind(number, weight, scales, offsets).dequantized()
        exact = held.to(torch.bfloat16).double()
        expected = x.double() @ exact.T + bias.double()
        largest = x.double().abs() @ exact.abs().T + 1
        # Of a result's rounding, and of weights near the middle of two bfloat16.
        error = (got.double() - expected).abs()
        assert (error <= 2**-8 * expected.abs() + 2**-8 / 16 * largest).all()
        parts = [linear(some, *rest) for some in x.split(9)]
        assert not torch.equal(torch.cat(parts), got)
        with LibraryWays(emulated_amx).keeping_one():
            kept = linear(x, *rest)
            assert torch.equal(torch.cat([linear(some, *rest) for some in x.split(9)]), kept)
        assert torch.equal(torch.cat(parts), kept)
        assert torch.equal(linear(x, *rest), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_tokens_keep_one_way(linear: Linear, dtype: torch.dtype) -> None:
    args = build_args(tokens=130, inputs=64, outputs=64, dtype=dtype, weight="strips of int4/32")
    whole = linear(*args)
    parts = [linear(some, *args[1:]) for some in args[0].split(9)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.usefixtures("one_way")
@pytest.mark.parametrize("kind", BYTES)
def test_a_choice_among_the_same_bits_changes_none(
    linear: Linear, emulated_amx: ctypes.CDLL, kind: str
) -> None:
    """Each way of each class of numbers of tokens, chosen for all formats."""
    choose: Any = emulated_amx.slipstream_choose_way
    choose.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
    usual: Any = emulated_amx.slipstream_way_of
    usual.argtypes, usual.restype = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int), ctypes.c_int64
    formats = range(len(FORMATS))
    for rows_class, tokens in enumerate(FIRST_ROWS):
        args = build_args(tokens=tokens, inputs=192, outputs=64, weight=f"strips of {kind}")
        before = [usual(each, tokens, True) for each in formats]
        results = []
        for way in (0, 1):
            assert all(choose(each, rows_class, True, way) for each in formats)
            results.append(linear(*args))
        assert torch.equal(*results)
        assert not choose(0, rows_class, True, 2)
        assert not choose(5, rows_class, True, 2)
        assert not choose(0, rows_class, False, 2)
        for each, way in zip(formats, before, strict=True):
            assert choose(each, rows_class, True, way)


def test_a_choice_holds_for_its_format_alone(linear: Linear, emulated_amx: ctypes.CDLL) -> None:
    """What is timed for a format is what its choice decides: tiles, or products of four."""
    count = emulated_amx.emulated_products
    count.restype = ctypes.c_int64
    ways, prepare, formats = LibraryWays(emulated_amx), timed_calls(linear), range(len(FORMATS))
    for chosen in formats:
        call = prepare(chosen, 1)
        for by_tiles in (True, False):
            for each in formats:
                ways.choose(each, 0, False, int((each == chosen) == by_tiles))
            before = int(count())
            call()
            assert (int(count()) > before) == by_tiles
        for each in formats:
            ways.choose(each, 0, False, 0)
