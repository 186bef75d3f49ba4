"""Masks of rows and their requests' constraints: compiled, in numpy, and one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src import SamplingParams
from src.core.request import Request
from src.core.step_message import DeviceRequest
from src.engine.grammar.masks import MaskTable, added_masks, packed_masks, unpacked
from src.ops.runtime.kernel_library import KernelLibrary

ROWS = 5


def tokens_of(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def constrained(grammar: set[int], request: Request) -> set[int]:
    """The rules, as they are told in the class's own words."""
    params = request.params
    if not (params.ignore_eos or params.allowed_token_ids or params.stop_token_ids):
        return grammar
    ends = set(request.end_token_ids)
    may_end = bool(grammar & ends)
    allowed = grammar | ends
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
    others = (grammar - ends) & allowed
    if not others:
        return ends if may_end else set()
    if params.ignore_eos or not may_end:
        return others
    return others | (ends & allowed)


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, list[tuple[set[int], Request]]]:
    vocab_size = draw(st.sampled_from([1, 31, 32, 33, 64, 117]))
    ids = st.sets(st.integers(0, vocab_size - 1), max_size=min(6, vocab_size))
    some = st.sets(st.integers(0, vocab_size - 1), min_size=1, max_size=min(6, vocab_size))
    rows = []
    for row in range(ROWS):
        grammar, ends = draw(ids), draw(ids)
        params = SamplingParams(
            ignore_eos=draw(st.booleans()),
            allowed_token_ids=draw(st.none() | some.map(tuple)),
            stop_token_ids=draw(st.just(()) | st.just(tuple(ends))),
        )
        rows.append(
            (
                grammar | draw(st.just(set()) | st.just(ends)),
                Request(
                    key=row, prompt_token_ids=[0], params=params, max_tokens=1,
                    end_token_ids=frozenset(ends),
                ),
            )
        )  # fmt: skip
    return vocab_size, rows


def installed(vocab_size: int, rows: Sequence[tuple[set[int], Request]]) -> MaskTable:
    table = MaskTable(len(rows), vocab_size)
    # Of somebody else before.
    table._constraints[:], table._ends[:], table._allowed[:] = 2, -1, 0
    for row, (grammar, request) in enumerate(rows):
        table.masks[row] = table._packed(grammar)
        table.install(row, DeviceRequest.of(request))
    return table


@given(tables(), st.sets(st.integers(0, ROWS - 1)))
@settings(max_examples=200, deadline=None)
def test_constraints_are_brought_into_masks(
    library: KernelLibrary, case: tuple[int, list[tuple[set[int], Request]]], chosen: set[int]
) -> None:
    vocab_size, rows = case
    compiled, plain = installed(vocab_size, rows), installed(vocab_size, rows)
    order = list(chosen)
    outcomes = compiled.restrict(order), plain.restrict_by_numpy(order)
    assert compiled._compiled is not None
    for table, possible in zip((compiled, plain), outcomes, strict=True):
        expected = [
            constrained(grammar, request) if row in chosen else grammar
            for row, (grammar, request) in enumerate(rows)
        ]
        assert [tokens_of(mask) for mask in table.masks] == expected
        if all(expected[row] for row in order):
            assert possible is None
        else:
            assert possible is not None
            assert [bool(each) for each in possible] == [bool(expected[row]) for row in order]


def test_many_words_give_the_interpreter_lock_away_and_the_same(library: KernelLibrary) -> None:
    source = np.random.default_rng(0)
    words = 4_000
    masks, ends, allowed = (
        source.integers(-(2**31), 2**31, (20, words)).astype(np.int32) for _ in range(3)
    )
    constraints = source.integers(0, 3, 20).astype(np.uint8)
    masks[7] = 0
    expected = masks.copy()
    one_by_one = library.bind_masks(expected, ends, allowed, constraints)
    assert [one_by_one([row]) is None for row in range(20)] == [row != 7 for row in range(20)]
    possible = library.bind_masks(masks, ends, allowed, constraints)(range(20))
    assert possible is not None
    assert [row for row in range(20) if not possible[row]] == [7]
    assert np.array_equal(masks, expected)


def test_rows_that_are_not_there_are_refused(library: KernelLibrary) -> None:
    masks = np.zeros((3, 2), np.int32)
    restrict = library.bind_masks(masks, masks, masks, np.zeros(3, np.uint8))
    for rows in ([3], [-1], [0, 7]):
        with pytest.raises(ValueError, match="rows below 3"):
            restrict(rows)
    assert restrict([]) is None
    with pytest.raises(ValueError, match="int32"):
        library.bind_masks(masks, masks[:2], masks, np.zeros(3, np.uint8))


def test_a_negative_row_may_be_anything() -> None:
    table = np.arange(6, dtype=np.int32).reshape(3, 2)
    assert packed_masks(table, [2, -1, 0]).tolist() == [[4, 5], [-1, -1], [0, 1]]
    assert table.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_masks_on_the_way_to_a_device_are_those_on_the_host() -> None:
    """Unpacked by torch, as on a GPU, and by numpy."""
    packed = np.random.default_rng(0).integers(-(2**31), 2**31, (5, 4)).astype(np.int32)
    on_device = unpacked(torch.from_numpy(packed.view(np.uint8)), 117)
    assert (on_device.shape, on_device.dtype) == ((5, 117), torch.float32)
    words = torch.from_numpy(packed.astype(np.int64))
    for token in range(117):
        bits = (words[:, token // 32] >> token % 32) & 1
        assert torch.equal(on_device[:, token], torch.where(bits == 1, 0.0, -torch.inf))
    assert np.array_equal(added_masks(packed, 117), on_device.numpy())
