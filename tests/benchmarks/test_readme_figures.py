"""Tables, picture and README say what the committed results say, and nothing else."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import readme
from benchmarks.chart import Bars, Panel, draw
from benchmarks.readme import BEGIN, END, chart, files, rewritten, section, summary

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


@pytest.mark.parametrize("path", [readme.README, readme.PAGE, readme.CHART], ids=lambda p: p.name)
def test_a_file_says_what_the_results_say(path: Path) -> None:
    assert path.read_text() == files()[path], "run `python -m benchmarks.readme`"


def test_the_check_names_what_differs_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "files", lambda: dict.fromkeys(paths, "new"))
    monkeypatch.setattr(readme, "CHECKOUT", tmp_path)
    paths = [tmp_path / "README.md", tmp_path / "docs" / "pictures.svg"]
    paths[0].write_text("new")
    monkeypatch.setattr(sys, "argv", ["readme", "--check"])
    with pytest.raises(SystemExit, match=r"docs/pictures\.svg$"):
        readme.main()
    assert not paths[1].exists()
    monkeypatch.setattr(sys, "argv", ["readme"])
    readme.main()
    assert paths[1].read_text() == "new"
    monkeypatch.setattr(sys, "argv", ["readme", "--check"])
    readme.main()


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


def contest(**medians: float) -> list[dict[str, Any]]:
    """Engines by name, with underscores for the comma of an option, and their first tokens."""
    return [
        {
            **peer(name.replace("__", ", "), "one", figures={"ttft": figure(median, "ms")}),
            "shape": readme.CHART_SHAPE,
        }
        for name, median in medians.items()
    ]


def texts_of(picture: str) -> list[str]:
    return [
        element.text or "" for element in ElementTree.fromstring(picture).iter() if element.text
    ]


def test_engines_stand_with_those_of_as_many_bits() -> None:
    texts = texts_of(chart(contest(slipstream=200.0, slipstream__int4=20.0, llama__Q4_0=50.0)))
    order = [
        *("weights of 16 bits", "slipstream 1.2", "200"),
        *("weights of 4 bits", "slipstream int4 1.2", "20", "llama Q4_0 1.2", "50"),
    ]
    assert [text for text in texts if text in order] == order
    assert "weights of 8 bits" not in texts


def test_the_picture_has_every_engine_of_the_page() -> None:
    (table,) = re.findall(
        r"(?ms)^## Engines, a model of 0.35 B parameters$.*?^## ", readme.PAGE.read_text()
    )
    named = {re.sub(r",|generate ", "", name) for name in re.findall(r"(?m)^\| (\w.*?) \|", table)}
    assert len(named) == 11
    assert named <= set(texts_of(readme.CHART.read_text()))


def test_a_bar_is_as_long_as_its_value() -> None:
    groups = {
        "one": [
            Bars("a", True, [100.0, None], ["100", ""]),
            Bars("b", False, [25.0, 3.0], ["25", "3"]),
        ],
        "other": [Bars("c", False, [50.0, 6.0], ["50", "6"])],
    }
    panels = [Panel("x", "m", more_is_better=True), Panel("y", "s", more_is_better=False)]
    root = ElementTree.fromstring(draw("<title> & more", ["a note"], panels, groups))
    bars = [
        float(element.attrib["width"])
        for element in root.iter("{http://www.w3.org/2000/svg}rect")
        if element.attrib["class"] in ("own", "other")
    ]
    assert bars == pytest.approx([bars[0], bars[0] / 4, bars[4] / 2, bars[0] / 2, bars[4]], abs=0.1)
    assert {"<title> & more", "m, more is better", "s, less is better", "a note"} <= set(
        texts_of(ElementTree.tostring(root, encoding="unicode"))
    )


def test_no_text_runs_into_the_next_or_out_of_the_picture() -> None:
    """With a wide font: the reader's own is not known."""
    root = ElementTree.fromstring(readme.CHART.read_text())
    rows: dict[float, list[tuple[float, float]]] = {}
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        classes = set(element.attrib["class"].split())
        wide = 6.5 if "small" in classes else 10.0 if "title" in classes else 7.4
        x = float(element.attrib["x"])
        span = (x, x + wide * len(element.text or ""))
        rows.setdefault(float(element.attrib["y"]), []).append(span)
    for spans in rows.values():
        spans.sort()
        starts = [start for start, _ in spans[1:]] + [float(root.attrib["width"])]
        assert all(end < start for (_, end), start in zip(spans, starts, strict=True)), spans


@pytest.mark.parametrize(
    ("load", "said"), [(0.1, "that was quiet"), (5.0, "that **was not** quiet")]
)
def test_the_sentence_says_how_busy_the_machine_was(load: float, said: str) -> None:
    lines = contest(slipstream=200.0, llama__Q4_0=50.0)
    text = summary([{**line, "machine": {**MACHINE, "load_before": load}} for line in lines])
    assert said in text.replace("\n", " ")
    assert "slipstream and llama on one small model" in text


def test_without_a_contest_there_is_no_picture() -> None:
    with pytest.raises(ValueError, match=readme.CHART_SHAPE):
        chart(PEERS)
