"""README's figures are what the committed results say, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.readme import BEGIN, END, README, lines_of, rewritten, section

MACHINE = {"cpu": "X", "cpus": 2, "flags": ["avx2"], "memory_gib": 23.5, "load_before": 0.1}
ABOUT = {
    "commit": "c0ffee",
    "command": "nox -s some",
    "machine": MACHINE,
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "time": "2026-11-21T19:00:00Z",
}


def figure(median: float, unit: str = "s") -> dict[str, Any]:
    return {"unit": unit, "median": median, "low": median, "high": median, "repeats": 3}


def suite(measure: str, group: str, seconds: float, **details: Any) -> dict[str, Any]:
    return {
        **ABOUT,
        "measure": measure,
        "group": group,
        "figures": {"seconds": figure(seconds)},
        **details,
    }


def peer(name: str, workload: str | None, **details: Any) -> dict[str, Any]:
    line = {
        **ABOUT,
        "measure": f"{name}, {workload}",
        "shape": "7m",
        "threads": 2,
        "busy_cores_of_others": 0.0,
        "peer": name,
        "peer_version": "1.2",
        "figures": {},
        **details,
    }
    return line if workload is None else {**line, "workload": workload}


SUITES = [
    suite("ttft", "one stream, time to first token", 0.0162, case="demo, in process"),
    suite(
        "rate", "32 streams, time per token of all", 5e-4, case="demo, http", **{"tok/s": 2000.0}
    ),
    suite(
        "an op", "linear", 2.5e-3, op="linear", case="1 token",
        **{"fraction of roofline": 0.87, "bound by": "memory", "machine GB/s": 26.0,
           "machine GFLOP/s": 100.0},
    ),
]  # fmt: skip
PEERS = [
    peer("slipstream", "one", figures={"ttft": figure(12.0, "ms"), "tpot": figure(2.0, "ms")}),
    peer("other", None, failure="not installed: no wheel"),
]


def test_the_readme_says_what_the_results_say() -> None:
    text = README.read_text()
    written = rewritten(text, section(lines_of("suites"), lines_of("peers"), lines_of("servers")))
    assert text == written, "run `python -m benchmarks.readme`"


def test_every_figure_stands_in_its_row() -> None:
    rows = section(SUITES, PEERS).splitlines()
    assert "| one stream, 128 tokens in: time to first token | 16.2 ms |  |  |" in rows
    assert "| 32 streams: output tokens per second |  | 2,000 |  |" in rows
    assert "| linear: 1 token | 2.5 ms | 87 % (memory) |" in rows
    assert "| slipstream 1.2 | 12 | 2 |  |  |  |  |  |  |" in rows
    assert "Missing: other: not installed: no wheel" in rows


def test_servers_stand_side_by_side() -> None:
    lines = [
        {
            **peer(name, f"{count} streams", figures={"output_throughput": figure(rate, "tok/s")}),
            "server": name,
            "streams": count,
            "shape": "7m",
            "input_len": 128,
            "output_len": 64,
        }
        for name, count, rate in [("a", 32, 9000.0), ("a", 128, 8000.0), ("b", 32, 4000.0)]
    ]
    rows = section([], [], lines).splitlines()
    heads = next(row for row in rows if "32 streams: tok/s" in row)
    assert heads.count("|") == 10
    assert "| a | 9,000 |  |  |  | 8,000 |  |  |  |" in rows
    assert "| b | 4,000 |  |  |  |  |  |  |  |" in rows


def test_a_newer_line_takes_the_place_of_the_older() -> None:
    newer = copy.deepcopy(SUITES[0])
    newer["figures"]["seconds"] = figure(0.5)
    text = section([*SUITES, newer], [])
    assert "500 ms" in text
    assert "16.2 ms" not in text


def test_runs_are_not_mixed() -> None:
    newer = [{**line, "commit": "decade"} for line in SUITES if line["measure"] != "rate"]
    text = section([*SUITES, *newer], [])
    assert "decade" in text
    assert "2,000" not in text


def test_a_part_does_not_take_the_place_of_the_whole() -> None:
    part = [{**line, "commit": "decade"} for line in SUITES if "op" in line]
    text = section([*SUITES, *part], [])
    assert "decade" not in text
    assert "2,000" in text


def test_a_contest_of_few_does_not_take_the_place_of_one_of_many() -> None:
    figures = {"ttft": figure(77.0, "ms")}
    few = [{**peer("slipstream", "one", figures=figures), "commit": "decade"}]
    assert "| slipstream 1.2 | 77 |" not in section([], [*PEERS, *few])
    many = [*few, {**PEERS[1], "commit": "decade"}]
    assert "| slipstream 1.2 | 77 |" in section([], [*PEERS, *many])


@pytest.mark.parametrize(("load", "is_noisy"), [(0.1, False), (5.0, True)])
def test_a_busy_machine_is_said(load: float, is_noisy: bool) -> None:
    lines = [{**line, "machine": {**MACHINE, "load_before": load}} for line in SUITES]
    assert ("not quiet" in section(lines, [])) == is_noisy


def test_markers_are_needed_once_each() -> None:
    assert rewritten(f"a {BEGIN} old {END} z", "new") == f"a {BEGIN}\n\nnew\n\n{END} z"
    for page in ("nothing", f"{END} {BEGIN}", f"{BEGIN} {END} {END}"):
        with pytest.raises(ValueError, match="once each"):
            rewritten(page, "new")
