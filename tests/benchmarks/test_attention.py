"""The benchmark of attention, of calls that take no time."""

from __future__ import annotations

import pytest

from benchmarks import attention
from benchmarks.attention import Family, Heads
from src.ops.build.kernels import ensure_built, kernel_library
from tests.benchmarks.conftest import Lines


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HEADS": (Heads(4, 2, 32),),
        "SHARED_HEADS": (Heads(4, 2, 32),),
        "PROMPT": 64,
        "DECODES": ((2, 40),),
        "FAMILIES": (Family(3, 512, 32), Family(2, 0, 32)),
        "_BEYOND_CACHES": 2**20,
        "_READ_FLOATS": 2**20,
        "_SIDES": (64,),
        "_PASS_SECONDS": 0.0,
        "_FEWEST_PASSES": 2,
    }.items():
        monkeypatch.setattr(attention, name, value)


def test_the_command_records_a_line_per_measurement(results: Lines) -> None:
    attention.main(["--repeats", "2", "--seconds", "0"])
    prompt, decode, *others = results("attention")
    coded = [line for line in others if "over 8 bits" in line["measure"]]
    shared = [line for line in others if line not in coded]
    assert [list(line["figures"]) for line in coded] == [["int8", "float8_e4m3fn"]]
    # 64 queries see 1 to 64 keys: two products of 32 elements each, for 4 heads.
    assert prompt["flops"] == 4 * 4 * 32 * (64 * 65 // 2)
    assert prompt["measure"] == "a prompt of 64, 4/2 heads of 32, bfloat16"
    assert prompt["figures"]["fraction"]["repeats"] == 2
    # Keys and values of 80 tokens, 2 heads of 32 elements of two bytes.
    assert decode["layers"] == -(-(2**20) // (80 * 2 * 2 * 32 * 2))
    for line in (prompt, decode):
        figures = {name: figure["median"] for name, figure in line["figures"].items()}
        assert figures["attention"] > 0
        assert figures["machine"] > 0
    assert [line["measure"].rsplit(", ", 1)[1] for line in shared] == ["many layers", "one layer"]
    for line in shared:
        assert list(line["figures"]) == [
            "3 rows, 512 keys shared, 32 own",
            "2 rows, no keys shared, 32 own",
        ]


def test_rows_share_and_do_not_in_turns_and_share_at_the_end(
    monkeypatch: pytest.MonkeyPatch, results: Lines
) -> None:
    ensure_built(wait=True)
    library = kernel_library()
    assert library is not None
    told: list[bool] = []
    share = library.share_prefixes

    def tell(value: bool) -> None:
        told.append(value)
        share(value)

    monkeypatch.setattr(library, "share_prefixes", tell)
    attention.main(["--parts", "shared", "--seconds", "0"])
    # Two passes of each in any order, and all as it was, for each family and place.
    assert len(told) == 4 * 5
    for family in range(0, len(told), 5):
        assert sorted(told[family : family + 2]) == sorted(told[family + 2 : family + 4])
        assert told[family] != told[family + 1]
        assert told[family + 4]
    assert len(results("attention")) == 2
