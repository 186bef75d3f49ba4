"""Rows of codes: what is rounded, how far, and that every kernel writes the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from src.ops import PAGED_ATTENTION
from src.ops.attention.cached_rows import CODES, FACTOR_BYTES, from_rows, row_size, to_rows
from src.ops.projections.linear import round_inputs
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import attention_matches, copied

KINDS = list(CODES)
LARGEST_FLOAT = torch.finfo(torch.float32).max


@pytest.mark.parametrize("dtype", KINDS)
def test_a_row_is_rounded_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    numbers = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * 7
    rows = to_rows(numbers, dtype)
    assert rows.dtype == dtype
    assert rows.shape == (50, 3, row_size(64, dtype)) == (50, 3, 64 + FACTOR_BYTES)
    error = (from_rows(rows).double() - numbers.double()).abs()
    largest = numbers.abs().amax(-1, keepdim=True).double()
    if dtype == torch.int8:
        assert (error <= largest / 127 / 2 * (1 + 1e-6)).all()
    else:
        # Of 3 bits of mantissa, or of the least number that there is.
        step = numbers.double().abs() / 16
        assert (error <= torch.maximum(step, largest / 448 * 2**-10) * (1 + 1e-6)).all()
    # The largest number of a row is kept but for its own rounding.
    assert torch.allclose(from_rows(rows).abs().amax(-1), numbers.abs().amax(-1), rtol=1e-6)


@pytest.mark.parametrize("dtype", KINDS)
def test_zeros_stay_zeros_and_what_is_not_finite_shows(dtype: torch.dtype) -> None:
    numbers = torch.ones(4, 8)
    numbers[0] = 0.0
    numbers[1, 3], numbers[2, 4] = torch.nan, torch.inf
    got = from_rows(to_rows(numbers, dtype))
    assert torch.equal(got[0], torch.zeros(8))
    assert got[1:3].isnan().all()
    assert torch.equal(got[3], torch.ones(8))


class Divisors(TorchDispatchMode):
    """Remembers what is divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.div:
            self.seen.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "rounds",
    [
        *(pytest.param(lambda x, kind=kind: to_rows(x, kind), id=str(kind)) for kind in KINDS),
        pytest.param(lambda x: round_inputs(x, 8), id="inputs"),
    ],
)
def test_a_reference_divides_by_tensors_as_kernels_do(rounds: Callable[[Any], Any]) -> None:
    """On CUDA torch multiplies by the reciprocal of a number, which is another bit now and then."""
    with Divisors() as divisors:
        rounds(torch.randn(3, 16))
    assert len(divisors.seen) == 2
    assert all(isinstance(each, torch.Tensor) and each.dim() for each in divisors.seen)


def test_an_ordinary_row_is_the_numbers_themselves() -> None:
    numbers = torch.randn(3, 2, 8)
    assert torch.equal(from_rows(to_rows(numbers, torch.bfloat16)), numbers.bfloat16().float())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_kernels_write_the_bits_of_the_reference(
    libraries: dict[str, KernelLibrary], kind: torch.dtype, data: st.DataObject
) -> None:
    """Of any magnitudes: subnormal ones, ties, zeros, infinities and NaN."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    args = PAGED_ATTENTION.build(
        "cpu", rows=((7, 7),), head_dim=8, dtype=dtype, cache_dtype=kind, block_size=4
    )
    some = st.one_of(
        # With bounds: without, most examples have a number too large for the width.
        st.floats(-65504, 65504, width=16),
        st.floats(-LARGEST_FLOAT, LARGEST_FLOAT, width=32),
        st.floats(-500, 500, width=32),
        st.integers(-254, 254).map(lambda n: n / 2),
    )
    numbers = data.draw(st.lists(some, min_size=112, max_size=112))
    special = st.tuples(st.integers(0, 111), st.sampled_from([torch.inf, -torch.inf, torch.nan]))
    for at, number in data.draw(st.lists(special, max_size=3)):
        numbers[at] = number
    args[1].copy_(torch.tensor(numbers).view(7, 2, 8).to(dtype))
    expected = copied(args)
    PAGED_ATTENTION.reference(*expected)
    for name, library in libraries.items():
        got = copied(args)
        library.paged_attention(*got)
        assert torch.equal(got[3].view(torch.uint8), expected[3].view(torch.uint8)), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [32, 96, 160])
def test_heads_that_end_in_half_a_lookup(
    library: KernelLibrary, kind: torch.dtype, head_dim: int
) -> None:
    """Tables look up 64 codes at a time; of these sizes the last 32 are left."""
    case = {"dtype": torch.bfloat16, "cache_dtype": kind, "head_dim": head_dim}
    for rows in (((1, 70),), ((1, 40), (1, 130)), ((40, 90), (1, 33))):
        args = PAGED_ATTENTION.build("cpu", rows=rows, **case)
        attention_matches(library.paged_attention, args)
