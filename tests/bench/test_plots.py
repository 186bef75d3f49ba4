from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from src.bench.plots import load, roofline, timeline
from src.bench.plots.canvas import NothingToDraw, write
from src.cli.main import main
from src.core.errors import ConfigError

SERVED = {
    "label": "ours", "request_rate": 4.0, "request_throughput": 3.5, "median_ttft_ms": 50.0,
    "p99_ttft_ms": 90.0, "median_tpot_ms": 10.0, "p99_tpot_ms": 12.0,
}  # fmt: skip
OP = {
    "measure": "x", "op": "linear", "case": "1 token", "GB/s": 5.0, "GFLOP/s": 10.0,
    "machine GB/s": 10.0, "machine GFLOP/s": 100.0,
}  # fmt: skip


def simulated(rate: str, throughput: float) -> dict[str, Any]:
    summary = {"mean": 0.1, "median": 0.1, "std": 0.0, "percentiles": {"90.0": 0.15, "99.0": 0.2}}
    latencies = dict.fromkeys(("ttft", "tpot", "e2el"), summary)
    return {
        "changes": {"request_rate": rate, "max_num_seqs": "8"},
        "outcome": {"request_throughput": throughput, **latencies},
    }


def trace() -> dict[str, Any]:
    """Two steps of 1 ms each, and a completion that they served."""
    events = []
    for step in (1, 2):
        for name, process, begin, length in (
            ("plan", 1, 0, 100), ("step", 2, 200, 700), ("publish", 1, 950, 50),
        ):  # fmt: skip
            events.append(
                {"ph": "X", "name": f"{name} {step}", "pid": process, "tid": 1,
                 "ts": 1000 * step + begin, "dur": length}
            )  # fmt: skip
    events.append({"ph": "X", "name": "decode", "pid": 3, "tid": 1, "ts": 1200, "dur": 1500})
    events.append({"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 1050})
    events.append({"ph": "f", "id": 1, "pid": 2, "tid": 1, "ts": 1300})
    return {"traceEvents": events, "otherData": {"first_step": 1}}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    contents = {
        "served": "\n".join(json.dumps({**SERVED, "request_rate": r}) for r in (4.0, "inf")),
        "simulated": json.dumps([simulated("1", 1.0), simulated("2", 1.9)]),
        "suites": "\n".join(json.dumps(line) for line in ({"measure": "other"}, OP)),
        "trace": json.dumps(trace()),
    }
    paths = {name: tmp_path / f"{name}.json" for name in contents}
    for name, path in paths.items():
        path.write_text(contents[name])
    return paths


def test_points_of_serve_and_of_simulate_meet_in_one_picture(files: dict[str, Path]) -> None:
    points = load.read_points([files["served"], files["simulated"]])
    assert [point.series for point in points[:3]] == ["ours", "ours", "simulated, max_num_seqs=8"]
    assert points[0].latencies["ttft"] == (50.0, 90.0)
    assert points[2].latencies["tpot"] == (100.0, 200.0)
    assert points[3].offered == 2.0
    first, second = load.draw(points, ("ttft", "e2el")).axes
    # Two series, each with its median and its 99th percentile.
    assert len(first.lines) == 4
    assert list(first.lines[0].get_xdata()) == [1.0, 1.9]
    assert list(first.lines[1].get_ydata()) == [200.0, 200.0]
    # What serve did not measure is not drawn.
    assert list(second.lines[2].get_xdata()) == []


def test_the_last_measurement_of_a_case_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "suites.jsonl"
    file.write_text("\n".join(json.dumps({**OP, "GFLOP/s": rate}) for rate in (10.0, 20.0)))
    (point,) = roofline.read_points([file])
    assert point.intensity == 4.0
    (axes,) = roofline.draw([point]).axes
    roof, reached = axes.lines[0], axes.lines[1]
    assert list(roof.get_ydata())[1:] == [100.0, 100.0]
    assert list(reached.get_xdata()) == [4.0]
    # 4 operations per byte at 10 GB/s would be 40 GFLOP/s.
    assert [text.get_text() for text in axes.texts] == ["1 token (50 %)"]


def test_a_timeline_has_its_steps_and_its_completions() -> None:
    (axes,) = timeline.draw(trace(), first=None, steps=2, lanes=1).axes
    assert {text.get_text().strip() for text in axes.texts} == {"step 1", "step 2", "decode"}
    assert axes.get_xlim() == (0.0, 2.0)
    (arrow,) = axes.lines
    assert list(arrow.get_xdata()) == pytest.approx([0.05, 0.3])
    with pytest.raises(NothingToDraw, match="publish 3"):
        timeline.draw(trace(), first=2, steps=2, lanes=1)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_same_figure_is_the_same_file(tmp_path: Path, suffix: str) -> None:
    for name in ("one", "other"):
        figure = timeline.draw(trace(), first=1, steps=1, lanes=1)
        write(figure, tmp_path / f"{name}.{suffix}")
    one, other = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "other"))
    assert one == other
    assert one.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")


def test_other_kinds_of_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.svg or \.png"):
        write(timeline.draw(trace(), first=1, steps=1, lanes=1), tmp_path / "a.pdf")


@pytest.mark.parametrize(
    "arguments",
    [
        ["load", "served", "simulated", "--metrics", "ttft"],
        ["roofline", "suites"],
        ["timeline", "trace", "--steps", "2", "--lanes", "1"],
    ],
)
def test_the_command_writes_a_picture(
    files: dict[str, Path], tmp_path: Path, arguments: list[str]
) -> None:
    given = [str(files.get(word, word)) for word in arguments]
    output = tmp_path / "picture.svg"
    assert main(["bench", "plot", *given, "-o", str(output)]) == 0
    assert "<svg" in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["load", "suites"], "no file is one of"),
        (["roofline", "served"], "no op was measured"),
        (["timeline", "served"], "no JSON"),
        (["timeline", "suites"], "no JSON"),
        (["load", "missing"], "cannot be read"),
    ],
)
def test_what_cannot_be_drawn_is_said(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    arguments: list[str], words: str,
) -> None:  # fmt: skip
    given = [str(files.get(word, word)) for word in arguments]
    assert main(["bench", "plot", *given, "-o", str(tmp_path / "a.svg")]) == 2
    assert words in capsys.readouterr().err
