"""The table of instruction set levels marks what it is for."""

from __future__ import annotations

from benchmarks.levels import marked


def test_a_cell_in_which_a_lower_level_wins_is_marked() -> None:
    assert marked({"portable": 50.0, "avx2": 9.0, "avx512": 12.0, "amx": 9.2}) == [
        "50.0",
        "9.0",
        "12.0 < avx2",
        # Two per cent are no win.
        "9.2",
    ]
    assert marked({"avx2": 10.0, "avx512": 8.0, "amx": 9.0}) == ["10.0", "8.0", "9.0 < avx512"]
