"""What the benchmark of speculation makes of its runs, and that each of its cases runs."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import pytest

from benchmarks import speculation
from src import AsyncEngine
from tests.support.compiling import compile_settings
from tests.support.steady_steps import steady_steps

DEMO = Path(__file__).parents[2] / "configs" / "demo"


def test_a_disturbed_run_changes_no_ratio() -> None:
    off, on = [2.0] * 8, [1.0] * 8
    assert speculation.typical_ratio(off, on) == pytest.approx(2)
    on[3], off[6] = 50.0, 90.0
    assert speculation.typical_ratio(off, on) == pytest.approx(2)
    pairs = speculation.Pairs()
    pairs.add(off, on)
    figures = pairs.figures()
    assert figures["off over on"].median == pytest.approx(2)
    assert figures["off over off"].median == pytest.approx(1, rel=0.5)
    assert figures["fastest off over fastest on"].median == 2


def test_what_is_always_slower_shows() -> None:
    source = random.Random(1)
    pairs = speculation.Pairs()
    for _ in range(15):
        machine = [1 + 0.2 * source.random() for _ in range(16)]
        pairs.add(machine, [each * 1.03 * (1 + 0.02 * source.random()) for each in machine])
    bounds = pairs.figures()["median of off over on"]
    assert bounds.high < 0.98 < 1
    assert bounds.low > 0.95


@pytest.mark.parametrize(("count", "place"), [(1, 0), (3, 0), (6, 0), (9, 1), (15, 3), (30, 9)])
def test_bounds_of_a_median_are_those_of_tables(count: int, place: int) -> None:
    """Distribution-free intervals of 95 % or more, as tables of the sign test have them."""
    values = [float(value) for value in range(count)]
    random.Random(count).shuffle(values)
    assert speculation.median_bounds(values) == (place, count - 1 - place)


def test_bounds_of_a_median_hold_in_95_of_100_cases() -> None:
    source = random.Random(2)
    held = 0
    for _ in range(2000):
        low, high = speculation.median_bounds([source.lognormvariate(0, 1) for _ in range(15)])
        held += low <= 1 <= high
    assert 0.94 < held / 2000 < 0.99


def test_a_pair_has_runs_for_about_its_time() -> None:
    assert speculation.runs_for(1.0, 0.1) == 10
    assert speculation.runs_for(1.0, 1e-9) == speculation._MOST_RUNS
    assert speculation.runs_for(1.0, 7.0) == speculation._FEWEST_RUNS
    assert all(speculation.runs_for(1.0, 0.013 * n) % 2 == 0 for n in range(1, 80))


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_each_case_measures_both_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    steady_steps(monkeypatch)
    arguments = ["--no-save", "--repeats", "1", "--seconds", "0.01", "--output-len", "12"]
    compiled = [f"compile.{key}={value}" for key, value in compile_settings().items()]
    settings = [*compiled, "device.num_threads=1"]
    made = {
        method: speculation.configuration(DEMO, method, settings, 8, keeps=True)
        for method in ("auto", "off")
    }
    kept = {method: each.speculation.shared_history_bytes for method, each in made.items()}
    assert kept == {"auto": 1 << 20, "off": 0}
    async with AsyncEngine.open(made["auto"]) as on, AsyncEngine.open(made["off"]) as off:
        total = 0.0
        begun = before = speculation.Acceptance.of(on)
        assert str(begun) == "no drafts"
        for case in speculation.CASES:
            options = speculation.parse([case, *arguments])
            found = await speculation.measure(case, on, off, 2, options)
            now = speculation.Acceptance.of(on)
            details = now.since(before).details
            before = now
            # Of every source, grammars included: none is left out of the sum.
            drafted = sum(count for count, _ in details["drafted_and_right"].values())
            assert sum(details["right_at"]) == sum(
                right for _, right in details["drafted_and_right"].values()
            )
            total += drafted
            assert off.metrics.draft_counts == (0, 0)
            for pairs in found.values():
                ratios = [pairs.ratios, pairs.scatter]
                assert [len(each) for each in ratios] == [1, 1]
                assert all(math.isfinite(ratio) and ratio > 0 for each in ratios for ratio in each)
                assert statistics.median(pairs.ratios) == pairs.figures()["off over on"].median
        # Not every case has some.
        assert on.metrics.draft_counts[0] == total > 0
        assert "right drafts: " in str(before.since(begun))


def test_acceptance_is_told_by_source_and_place() -> None:
    counts = {"suffix": (9.0, 5.0), "grammar": (4.0, 4.0), "mtp": (0.0, 0.0)}
    before = speculation.Acceptance(2, {**counts, "suffix": (1.0, 1.0)}, [1, 0, 0, 0])
    now = speculation.Acceptance(6, counts, [5, 3, 1, 0])
    assert str(now.since(before)) == (
        "right drafts: suffix 4 of 8; by place 1.00 0.75 0.25 of 4 rows"
    )
    assert str(now).startswith("right drafts: suffix 5 of 9, grammar 4 of 4; by place 0.83 0.50")
    assert set(speculation._DRAFTING) >= {"suffix", "grammar", "mtp", "eagle3", "history"}


def test_what_drafts_cost_is_told_by_tokens_and_drafts() -> None:
    widths = speculation.Widths()
    for _ in range(3):
        widths.costs.took(8, 0, 0.002)
        widths.costs.took(8, 3, 0.0026)
    figures = speculation.cost_figures(widths)
    assert list(figures) == ["8 tokens, no drafts", "5 to 8 tokens, 2 to 3 drafts"]
    assert str(figures["8 tokens, no drafts"]) == "2 ms"
    price = figures["5 to 8 tokens, 2 to 3 drafts"]
    # Some of it is still assumed.
    assert price.repeats == 3
    assert 1 / 12 < price.median < 0.1


def test_the_same_question_again_has_engines_that_keep_what_they_say() -> None:
    plan = speculation.engines_of(speculation.parse(["plain", "again", "--rows", "8", "128"]))
    assert plan == {
        (False, False): [("plain", 8)],
        (True, False): [("plain", 128)],
        (False, True): [("again", 8)],
        (True, True): [("again", 128)],
    }
    kept = speculation.configuration(
        DEMO, "auto", ["speculation.shared_history_bytes=65536"], 8, keeps=True
    )
    assert kept.speculation.shared_history_bytes == 65536
    assert speculation.configuration(DEMO, "auto", [], 8).speculation.shared_history_bytes == 0
