"""What a schedule promises, whatever the rows: every key once, and an equal share for everybody."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.ops import AttentionSpec, step_schedule
from src.ops.attention.decode_schedule import LEAST_SHARED, decode_schedule, schedule_size


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Block tables of a tree of prefixes, with lengths, tiles and packs of any size."""
    block_size = draw(st.sampled_from([4, 16, 32]))
    rows, fresh = draw(st.integers(1, 12)), iter(range(10**6))
    tables: list[list[int]] = []
    lengths: list[int] = []
    for row in range(rows):
        length = draw(st.integers(0, 40 * block_size))
        blocks = -(-length // block_size)
        shared = 0
        if row and draw(st.booleans()):
            other = draw(st.integers(0, row - 1))
            # The block that is being written is nobody else's.
            limit = min(lengths[other] - 1, length - 1) // block_size
            shared = draw(st.integers(0, max(0, limit)))
        own = [next(fresh) for _ in range(blocks - shared)]
        tables.append((tables[other][:shared] if shared else []) + own)
        lengths.append(length)
    width = max(map(len, tables))
    return {
        "block_tables": torch.tensor([t + [-1] * (width - len(t)) for t in tables]).int(),
        "query_lens": [draw(st.sampled_from([1, 1, 1, 2, 0])) for _ in range(rows)],
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_size": block_size,
        "sliding_window": draw(st.sampled_from([0, 0, 0, 1, 70])),
        "chunk": draw(st.sampled_from([0, 0, 0, 1, 70])),
        "tile": draw(st.sampled_from([8, 16, 64])),
        "members": draw(st.sampled_from([1, 2, 4, 16])),
    }


@settings(max_examples=300, deadline=None)
@given(batches())
def test_every_key_of_a_decoding_row_is_read_once(batch: dict[str, Any]) -> None:
    query_lens, tile = batch.pop("query_lens"), batch["tile"]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    flat = decode_schedule(query_start_loc=starts, **batch)
    rows, members = len(query_lens), batch["members"]
    spec = AttentionSpec(1.0, window=batch["sliding_window"] or None, chunk=batch["chunk"] or None)
    assert len(flat) == schedule_size(rows, members)
    sizes = (2 * rows + 1, rows, rows, rows * members)
    tile_starts, place, shared, packs = (part.tolist() for part in flat.split(sizes))
    counts = [after - before for before, after in itertools.pairwise(tile_starts)]
    assert min(counts) >= 0
    assert counts[::2] == shared
    for row, length in enumerate(batch["seq_lens"].tolist()):
        own = counts[2 * row + 1]
        if query_lens[row] != 1 or length == 0:
            assert (own, shared[row], place[row]) == (0, 0, -1)
            continue
        total, skipped = -(-length // tile), spec.first_visible(length - 1) // tile
        with_pack = 0
        if place[row] >= 0:
            first, slot = divmod(place[row], members)
            assert packs[first * members + slot] == row
            with_pack = shared[first]
            # What it reads with its pack is what it would have read itself, and whole tiles of it.
            blocks = -(-with_pack * tile // batch["block_size"])
            tables = batch["block_tables"]
            assert tables[row, :blocks].tolist() == tables[first, :blocks].tolist()
            assert with_pack * tile <= length
        assert with_pack == 0 or (with_pack >= LEAST_SHARED and not spec.features)
        assert with_pack + own == total - skipped


def test_rows_of_a_prefix_read_it_together() -> None:
    common = list(range(100, 132))
    tables = torch.tensor([[*common, row] for row in range(6)], dtype=torch.int32)
    starts = torch.arange(7, dtype=torch.int32)
    lengths = torch.full((6,), 33 * 16, dtype=torch.int32)
    flat = decode_schedule(tables, starts, lengths, 16, 0, 0, 64, 4).tolist()
    # 8 tiles of 64 are shared by rows 0 to 3, and by rows 4 and 5; each has one of its own.
    assert flat[:13] == [0, 8, 9, 9, 10, 10, 11, 11, 12, 20, 21, 21, 22]
    assert flat[13:19] == [0, 1, 2, 3, 16, 17]
    assert flat[19:25] == [8, 0, 0, 0, 8, 0]
    assert flat[25:29] == [0, 1, 2, 3]
    assert flat[41:45] == [4, 5, -1, -1]


def test_a_cpu_is_told_nothing() -> None:
    none = torch.zeros(1, dtype=torch.int32)
    assert (
        step_schedule(torch.zeros(1, 16, 2, 8), 4, none[None], none, none, AttentionSpec(1.0))
        is None
    )
