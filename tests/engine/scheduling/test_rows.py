from __future__ import annotations

import pytest

from src.engine.kv.block_pool import InvariantError
from src.engine.scheduling.rows import RowTable


def test_the_lowest_free_row_comes_first_and_generations_count() -> None:
    rows = RowTable(3)
    assert [rows.take() for _ in range(3)] == [(0, 1), (1, 1), (2, 1)]
    assert rows.num_free == 0
    rows.release(2, 1)
    rows.release(0, 1)
    assert [rows.take() for _ in range(2)] == [(0, 2), (2, 2)]


def test_misuse_is_an_invariant_error() -> None:
    rows = RowTable(1)
    rows.take()
    with pytest.raises(InvariantError, match="all 1 are taken"):
        rows.take()
    with pytest.raises(InvariantError, match="row 0 generation 2 is released, but it is taken"):
        rows.release(0, 2)
    rows.release(0, 1)
    with pytest.raises(InvariantError, match="it is free at 1"):
        rows.release(0, 1)
