"""Decoding rows of bfloat16: few query rows of a key head, at every level that this CPU has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from src.ops import PAGED_ATTENTION
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import copied

LENGTHS = (1, 2, 17, 63, 64, 65, 301, 700)
QUERY_ROWS = [1, 2, 3, 4, 5]


def build(query_rows: int, head_dim: int, **changes: Any) -> tuple[Any, ...]:
    case = {
        "rows": tuple((1, length) for length in LENGTHS),
        "num_heads": 2 * query_rows,
        "num_kv_heads": 2,
        "head_dim": head_dim,
        "block_size": 16,
        "dtype": torch.bfloat16,
    }
    return PAGED_ATTENTION.build("cpu", **case | changes)


def exact(args: tuple[Any, ...]) -> torch.Tensor:
    """By the reference, in float32."""
    is_rounded = lambda x: isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16  # noqa: E731
    wide = copied(tuple(x.float() if is_rounded(x) else x for x in args))
    PAGED_ATTENTION.reference(*wide)
    return wide[9]


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("query_rows", QUERY_ROWS)
def test_equal_what_floats_give_but_for_rounding(
    libraries: dict[str, KernelLibrary], query_rows: int, head_dim: int, window: int
) -> None:
    args = build(query_rows, head_dim, sliding_window=window)
    expected = exact(args)
    allowed = 1.5 * (expected.bfloat16().float() - expected).square().mean().sqrt()
    for library in libraries.values():
        some = copied(args)
        library.paged_attention(*some)
        off = some[9].float() - expected
        assert off.square().mean().sqrt() < allowed
        torch.testing.assert_close(some[9].float(), expected, rtol=2**-7, atol=4e-3)


@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize("query_rows", QUERY_ROWS)
def test_many_that_share_keys_have_the_bits_that_each_has_for_itself(
    libraries: dict[str, KernelLibrary], query_rows: int, head_dim: int
) -> None:
    rows = tuple((1, 520 + 7 * i) for i in range(12))
    args = build(query_rows, head_dim, rows=rows, prefixes=dict.fromkeys(range(1, 12), (0, 32)))
    for library in libraries.values():
        together, apart = copied(args), copied(args)
        library.paged_attention(*together)
        assert library.attention_items(*together).items < 12 * 3
        library.share_prefixes(False)
        try:
            library.paged_attention(*apart)
        finally:
            library.share_prefixes(True)
        assert torch.equal(together[9], apart[9])


@pytest.mark.parametrize("query_rows", QUERY_ROWS)
def test_an_infinite_value_is_no_nan_whether_it_has_a_neighbour_or_not(
    libraries: dict[str, KernelLibrary], query_rows: int
) -> None:
    for length, window in ((4, 0), (5, 0), (200, 0), (201, 0), (200, 33), (201, 33)):
        for position in {length - 1, max(0, length - window) if window else 0}:
            args = build(query_rows, 64, rows=((1, length),), sliding_window=window)
            slot = int(args[5][0, position // 16]) * 16 + position % 16
            # A row's last key and value come with the call; all others are in the cache.
            of_head = args[2][0] if position == length - 1 else args[4].flatten(0, 1)[slot]
            of_head[0, 0] = torch.inf
            for library in libraries.values():
                some = copied(args)
                library.paged_attention(*some)
                assert some[9][0, :query_rows, 0].isposinf().all()
                assert some[9].isnan().sum() == 0


@pytest.mark.parametrize("query_rows", [*QUERY_ROWS, 40, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_query_that_is_no_number_gives_none(
    libraries: dict[str, KernelLibrary], query_rows: int, dtype: torch.dtype
) -> None:
    """Nor does it reach another head, in one split or in several."""
    for length, deterministic in ((320, False), (320, True), (2600, False), (2600, True)):
        shape = {"rows": ((-(-query_rows // 2), length),), "dtype": dtype}
        args = build(2, 64, **shape, deterministic=deterministic)
        args[0][:, 0] = torch.nan
        for library in libraries.values():
            some = copied(args)
            library.paged_attention(*some)
            assert some[9][:, 0].isnan().all()
            assert some[9][:, 1:].isfinite().all()


@pytest.mark.parametrize("query_rows", QUERY_ROWS)
def test_weights_add_up_to_one(libraries: dict[str, KernelLibrary], query_rows: int) -> None:
    args = build(query_rows, 64, rows=((1, 250),))
    for values in (args[2], args[4]):
        values.fill_(1.9921875)
    # All weigh half as much as the first one and a little more, and are rounded the same way.
    args[0].fill_(0.125)
    for keys in (args[1], args[3]):
        keys.zero_()
    args[3].flatten(0, 1)[int(args[5][0, 0]) * 16] = 0.6875
    for library in libraries.values():
        some = copied(args)
        library.paged_attention(*some)
        assert (some[9] == 1.9921875).all()
