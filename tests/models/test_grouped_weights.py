"""Levels of any integer format become one weight, exactly, and multiply as its matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.ops.matrix import Tiling, of_levels
from src.ops.projections.linear import round_inputs
from src.ops.projections.projection import Projection


def levels_of(
    rows: int, inputs: int, bits: int, *, signed: bool, seed: int = 0
) -> tuple[torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    low = -(2 ** (bits - 1)) if signed else 0
    dtype = torch.int8 if signed else torch.uint8
    shape = (rows, inputs)
    return torch.randint(low, low + 2**bits, shape, generator=generator, dtype=dtype), generator


def matrix_of(levels: torch.Tensor, scales: torch.Tensor, offsets: Any) -> torch.Tensor:
    """`level * scale - offset` in float64."""
    group = levels.shape[1] // scales.shape[1]
    wide = levels.double() * scales.double().repeat_interleave(group, dim=1)
    return wide if offsets is None else wide - offsets.double().repeat_interleave(group, dim=1)


@settings(max_examples=120, deadline=None)
@given(
    rows=st.sampled_from([1, 7, 64, 128]),
    bits=st.integers(2, 8),
    group=st.sampled_from([16, 32, 48, 64, 128, 384]),
    signed=st.booleans(),
    offset=st.booleans(),
    in_strips=st.booleans(),
    seed=st.integers(0, 100),
)
def test_every_level_is_held_exactly(
    rows: int, bits: int, group: int, signed: bool, offset: bool, in_strips: bool, seed: int
) -> None:
    levels, generator = levels_of(rows, 384, bits, signed=signed, seed=seed)
    # Of 11 bits, as float16 has them: products and sums of them are exact in float32.
    scales = (torch.rand(rows, 384 // group, generator=generator) + 0.5).half()
    offsets = torch.randint(-999, 999, scales.shape, generator=generator) / 64 if offset else None
    weight = of_levels(levels, bits, scales, offsets, tiled=in_strips)
    assert torch.equal(weight.dequantized().double(), matrix_of(levels, scales, offsets))
    cuts = rows % 64 == 0 or (group == 384 and weight.scales.dim() == 1)
    assert (weight.tiling is Tiling.TILES) == (in_strips and cuts)
    assert (weight.values.dtype == torch.uint8) == (bits <= 4 and group % 32 == 0)
    outline = of_levels(
        *(levels.to("meta"), bits, scales.to("meta")),
        None if offsets is None else offsets.to("meta"),
        tiled=in_strips,
    )
    assert outline.values.shape == weight.values.shape


def test_zero_points_in_the_middle_are_no_offsets() -> None:
    levels, _ = levels_of(64, 128, 4, signed=False)
    scales = torch.rand(64, 4)
    symmetric = of_levels(levels, 4, scales, 8 * scales)
    assert symmetric.offsets is None
    crooked = of_levels(levels, 4, scales, 7 * scales)
    assert crooked.offsets is not None
    assert crooked.nbytes == symmetric.nbytes + scales.nbytes
    of_rows = of_levels(levels, 8, scales[:, :1], 128 * scales[:, :1])
    assert of_rows.scales.shape == (64,)


@pytest.mark.parametrize("in_strips", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (6, 16), (8, 32), (4, 128)])
@pytest.mark.parametrize("offset", [False, True])
def test_a_product_is_that_of_the_matrix(
    bits: int, group: int, offset: bool, in_strips: bool
) -> None:
    levels, generator = levels_of(128, 256, bits, signed=False)
    scales = torch.rand(128, 256 // group, generator=generator) / 256
    offsets = torch.rand(scales.shape, generator=generator) if offset else scales * 2 ** (bits - 1)
    weight = of_levels(levels, bits, scales, offsets, tiled=in_strips)
    x = torch.randn(5, 256, generator=generator)
    inputs = round_inputs(x, weight.rounding_unit) if in_strips else x
    bias = torch.randn(128, generator=generator)
    expected = inputs.double() @ matrix_of(levels, scales, offsets).T + bias.double()
    assert torch.allclose(
        Projection(weight).multiply(x, bias).double(), expected, atol=1e-4, rtol=1e-5
    )


def test_groups_that_cannot_be_held_are_refused() -> None:
    levels, _ = levels_of(2, 96, 4, signed=False)
    for groups in (5, 12):
        with pytest.raises(ValueError, match=f"cannot be cut into {groups} groups"):
            of_levels(levels, 4, torch.ones(2, groups))
    with pytest.raises(ValueError, match="rows of 80 weights"):
        of_levels(levels[:, :80], 4, torch.ones(2, 1))
