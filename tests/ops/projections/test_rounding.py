"""Weights rounded by the compiled kernel: the same bits as of the torch reference."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.ops.matrix import Matrix
from src.ops.projections import rounding
from src.ops.projections.rounding import quantize
from src.ops.runtime.kernel_library import KernelLibrary

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def by(library: KernelLibrary | None, *arguments: Any, in_strips: bool) -> Matrix:
    with mock.patch.object(rounding._on_cpu, "kernel", library and library.quantize):
        return quantize(*arguments, tiled=in_strips)


def assert_same(libraries: dict[str, KernelLibrary], *arguments: Any, in_strips: bool) -> None:
    method = arguments[1]
    expected = by(None, *arguments, in_strips=in_strips)
    outline = quantize(arguments[0].to("meta"), *arguments[1:], tiled=in_strips)
    assert (outline.encoding, outline.tiling) == (expected.encoding, expected.tiling)
    assert outline.tensors().keys() == expected.tensors().keys()
    for name, one in outline.tensors().items():
        other = expected.tensors()[name]
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    for library in libraries.values():
        got = by(library, *arguments, in_strips=in_strips)
        assert (got.encoding, got.tiling) == (expected.encoding, expected.tiling)
        assert got.values.dtype == expected.values.dtype
        assert torch.equal(got.values, expected.values)
        assert torch.equal(got.scales, expected.scales)
        assert got.scales.is_contiguous()
        if method == "int8":
            assert got.offsets is expected.offsets is None
            continue
        assert got.offsets is not None
        assert torch.equal(got.offsets, expected.offsets)
        assert got.offsets.is_contiguous()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bits_are_those_of_the_reference(
    libraries: dict[str, KernelLibrary], data: st.DataObject
) -> None:
    method = data.draw(st.sampled_from(["int8", "int4"]))
    group = data.draw(st.sampled_from([32, 64, 96]))
    inputs = data.draw(st.sampled_from([192, 384] if method == "int4" else [32, 64, 96, 320]))
    rows = data.draw(st.integers(1, 150))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    weight = torch.randn(rows, inputs, generator=random)
    # Small integers: many of the same magnitude, of either sign, and many zeros.
    weight = data.draw(st.sampled_from([weight, weight.round(), weight * 2.0**-10, weight + 100]))
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    weight = weight.to(data.draw(st.sampled_from(DTYPES)))
    assert_same(libraries, weight, method, group, in_strips=data.draw(st.booleans()))


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_rows_of_zeros_and_large_weights(libraries: dict[str, KernelLibrary], method: str) -> None:
    weight = torch.zeros(64, 128)
    weight[1] = 3e38
    weight[2, 5] = -1e-38
    weight[3] = torch.tensor([7.0, -7.0] * 64)
    for in_strips in (False, True):
        assert_same(libraries, weight, method, 32, in_strips=in_strips)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(
    libraries: dict[str, KernelLibrary], bad: float
) -> None:
    weight = torch.randn(64, 128)
    for method in ("int8", "int4"):
        for library in libraries.values():
            expected = by(library, weight, method, 32, in_strips=False)
            spoilt = weight.clone()
            spoilt[7, 3] = bad
            got = by(library, spoilt, method, 32, in_strips=False)
            others = [row for row in range(64) if row != 7]
            assert torch.equal(got.values[others], expected.values[others])
            assert torch.equal(got.scales[others], expected.scales[others])


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_the_reference_leaves_weights_as_they_are(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one group of one row, and rows that lie apart; whatever torch's default dtype is."""
    monkeypatch.setattr(rounding._on_cpu, "kernel", None)
    for weight in (torch.randn(1, 32), torch.randn(4, 96)[:, :64]):
        before = weight.clone()
        expected = rounding.quantize(before.clone(), method, 32)
        monkeypatch.setattr(rounding, "_AT_ONCE", 64)
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = rounding.quantize(weight, method, 32)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(weight, before)
        assert torch.equal(found.dequantized(), expected.dequantized())


def test_what_does_not_fit_is_refused(library: KernelLibrary) -> None:
    weight = torch.ones(64, 96)
    with pytest.raises(ValueError, match="multiple of 32"):
        library.quantize(weight[:, :40].contiguous(), "int8", 32, tiled=False)
    with pytest.raises(ValueError, match="multiple of 32"):
        library.quantize(weight, "int4", 64, tiled=False)
    with pytest.raises(ValueError, match="contiguous"):
        library.quantize(weight[:, :64], "int8", 32, tiled=False)


def test_sums_of_large_groups_are_exact(libraries: dict[str, KernelLibrary]) -> None:
    """Float32 has no room for them, and what is left after a subtraction would show it."""
    weight = 1 - torch.rand(400, 2048, generator=torch.Generator().manual_seed(5)) / 16
    weight[:, ::1024] = 0
    for group in (256, 1024):
        assert_same(libraries, weight, "int4", group, in_strips=False)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_without_kernels_several_pieces_are_rounded_at_once(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """As a first start does, which takes as long as its matrices do."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(7))
    monkeypatch.setattr(rounding._on_cpu, "kernel", None)
    expected = rounding.quantize(weight, method, 32)
    both = threading.Barrier(2)
    name = f"round_to_{method}"
    real = getattr(rounding, name)

    team_sizes = []

    def met(*arguments: Any) -> Any:
        both.wait(10)
        team_sizes.append(torch.get_num_threads())
        return real(*arguments)

    monkeypatch.setattr(rounding, name, met)
    monkeypatch.setattr(rounding, "_AT_ONCE", 8 * 64)
    monkeypatch.setattr(rounding, "usable_cpus", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = rounding.quantize(weight, method, 32)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    # Not as many threads of torch's for each of ours.
    assert set(team_sizes) == {1}
    for kind, tensor in expected.tensors().items():
        assert torch.equal(found.tensors()[kind], tensor)
