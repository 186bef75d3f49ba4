"""The padding ladder is a pure function: what holds of it, holds of every size."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from src.compile.graphs.ladder import GraphShape, PaddingLadder, padded, rungs

LIMITS = st.integers(0, 5000)


def test_the_rungs_of_256_rows() -> None:
    assert rungs(256) == (
        *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64),
        *(80, 96, 112, 128, 160, 192, 224, 256),
    )
    assert rungs(3) == (1, 2, 3)
    assert rungs(0) == ()


@given(LIMITS)
def test_rungs_ascend_to_the_limit(limit: int) -> None:
    sizes = rungs(limit)
    assert all(low < high for low, high in pairwise(sizes))
    assert sizes[-1:] == ((limit,) if limit else ())


@given(st.data(), st.integers(1, 5000))
def test_every_size_has_a_rung_and_little_is_wasted(data: st.DataObject, limit: int) -> None:
    size = data.draw(st.integers(1, limit))
    rung = padded(size, rungs(limit))
    assert rung is not None
    assert rung >= size
    assert rung - size < max(8, size / 4) if size > 8 else rung < 2 * size


@given(st.integers(1, 2000))
def test_no_rung_holds_what_is_over_the_last(limit: int) -> None:
    assert padded(limit + 1, rungs(limit)) is None


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 4000))
def test_more_tokens_never_get_a_smaller_rung(limit: int, one: int, other: int) -> None:
    low, high = sorted((min(one, limit), min(other, limit)))
    sizes = rungs(limit)
    smaller, larger = padded(low, sizes), padded(high, sizes)
    assert smaller is not None
    assert larger is not None
    assert smaller <= larger


@given(st.integers(1, 4096))
def test_there_are_few_rungs(limit: int) -> None:
    # 4 small ones, 7 up to 64, and 4 for every doubling from there on.
    assert len(rungs(limit)) <= 11 + 4 * max(0, (limit - 1).bit_length() - 6)


@given(st.integers(0, 600), st.integers(0, 2000), st.integers(1, 2500), st.booleans())
@example(8, 100, 3, True)
def test_candidates_hold_the_step_and_are_captured(
    max_rows: int, max_mixed_tokens: int, num_tokens: int, decodes: bool
) -> None:
    ladder = PaddingLadder(max_rows, max_mixed_tokens)
    candidates = ladder.candidates(num_tokens, decodes=decodes)
    assert all(shape.num_tokens >= num_tokens for shape in candidates)
    assert set(candidates) <= set(ladder.shapes)
    kinds = [shape.kind for shape in candidates]
    expected = ["decode"] * (decodes and num_tokens <= max_rows)
    assert kinds == expected + ["mixed"] * (num_tokens <= max_mixed_tokens)


@given(st.integers(0, 600), st.integers(0, 2000))
def test_shapes_are_captured_largest_first(max_rows: int, max_mixed_tokens: int) -> None:
    ladder = PaddingLadder(max_rows, max_mixed_tokens)
    for shapes in (ladder.shapes, ladder.first):
        sizes = [shape.num_tokens for shape in shapes]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(shapes)) == len(shapes)
    assert set(ladder.first) <= set(ladder.shapes)


def test_the_first_are_those_of_few_users() -> None:
    ladder = PaddingLadder(64, 128)
    assert ladder.first == [GraphShape("decode", size) for size in (8, 4, 2, 1)]
    assert ladder.shapes[0] == GraphShape("mixed", 128)
    assert PaddingLadder(0, 5).shapes == [GraphShape("mixed", 5)]


@given(st.integers(0, 300), st.integers(0, 40), st.integers(0, 600), st.data())
def test_steps_with_drafts_have_few_shapes_that_hold_them(
    max_rows: int, max_drafts: int, max_sampled: int, data: st.DataObject
) -> None:
    ladder = PaddingLadder(max_rows, 0, max_drafts=max_drafts, max_sampled=max_sampled)
    shapes = [shape for shape in ladder.shapes if shape.kind == "verify"]
    assert len(shapes) <= 4 * (max_rows.bit_length() + 1)
    assert all(shape.num_tokens <= max_sampled for shape in shapes)
    assert all(shape.num_tokens % shape.width == 0 for shape in shapes)
    rows = data.draw(st.integers(1, max_rows + 1))
    width = data.draw(st.integers(1, max_drafts + 2))
    found = ladder.verifying(rows, width)
    holding = [
        shape
        for shape in shapes
        if shape.width >= width and shape.num_tokens // shape.width >= rows
    ]
    # Where the next width holds fewer rows than are asked for, no wider one holds them.
    assert found == min(holding, key=lambda shape: (shape.width, shape.num_tokens), default=None)


def test_the_shapes_of_eight_rows_with_drafts() -> None:
    ladder = PaddingLadder(8, 0, max_drafts=16, max_sampled=64)
    shapes = [(s.num_tokens // s.width, s.width) for s in ladder.shapes if s.kind == "verify"]
    assert shapes == [
        *((8, 8), (2, 17), (8, 4), (4, 8), (1, 17), (8, 2), (4, 4)),
        *((2, 8), (4, 2), (2, 4), (1, 8), (2, 2), (1, 4), (1, 2)),
    ]
    assert ladder.verifying(3, 5) == GraphShape("verify", 32, width=8)
    assert ladder.verifying(5, 9) is None
    assert [s for s in PaddingLadder(8, 16).shapes if s.kind == "verify"] == []
