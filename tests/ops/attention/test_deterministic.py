"""Deterministic attention: a token's bits depend on its query, keys and values alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.ops import PAGED_ATTENTION
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import bits, copied, drawn_attention, in_chunks

lengths = st.one_of(st.integers(2, 60), st.integers(200, 700))


def prefill(length: int, **case: Any) -> tuple[Any, ...]:
    return PAGED_ATTENTION.build("cpu", rows=((length, length),), deterministic=True, **case)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_chunks_give_the_bits_of_the_whole_prompt(
    libraries: dict[str, KernelLibrary], data: st.DataObject
) -> None:
    length = data.draw(lengths)
    groups = [(2, 1), (1, 2), (2, 3), (1, 20)]
    whole = prefill(length, **drawn_attention(data, groups), seed=length)
    cuts = data.draw(st.lists(st.integers(1, length - 1), max_size=4))
    # Chunks of one token, as in decode.
    cuts += [cut + 1 for cut in cuts]
    bounds = [0, *sorted({cut for cut in cuts if cut < length}), length]
    for library in libraries.values():
        torch.set_num_threads(1)
        expected = in_chunks(library.paged_attention, copied(whole), [0, length])
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        got = in_chunks(library.paged_attention, copied(whole), bounds)
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reach", [{}, {"sliding_window": 300}, {"chunk": 200}])
def test_decode_gives_the_bits_of_the_prompt(
    libraries: dict[str, KernelLibrary], dtype: torch.dtype, reach: dict[str, int]
) -> None:
    """Every token alone: each boundary of a tile, a split, a window and a chunk is met."""
    whole = prefill(620, dtype=dtype, num_heads=6, **reach)
    for library in libraries.values():
        expected = in_chunks(library.paged_attention, copied(whole), [0, 620])
        got = in_chunks(library.paged_attention, copied(whole), range(621))
        assert torch.equal(bits(got), bits(expected))


def test_company_changes_nothing(libraries: dict[str, KernelLibrary]) -> None:
    rows = ((1, 1000), (70, 70), (0, 4), (1, 300), (33, 600), (20, 900))
    args = PAGED_ATTENTION.build("cpu", rows=rows, deterministic=True, padding=2)
    starts = args[6].tolist()
    for library in libraries.values():
        together = copied(args)
        torch.set_num_threads(2)
        library.paged_attention(*together)
        torch.set_num_threads(1)
        for row, (query_len, seq_len) in enumerate(rows):
            tokens = slice(starts[row], starts[row + 1])
            alone = copied(args)
            library.paged_attention(
                *(x[tokens] for x in alone[:3]),
                *alone[3:5],
                alone[5][row : row + 1],
                torch.tensor([0, query_len], dtype=torch.int32),
                alone[7][row : row + 1],
                alone[8][tokens],
                alone[9][tokens],
                *alone[10:12],
                query_len,
                seq_len,
                True,
            )
            assert torch.equal(bits(alone[9][tokens]), bits(together[9][tokens]))
