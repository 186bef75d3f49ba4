"""The acceptance of a GPU, where there is none: limits, table, time, and all that a CPU can run."""

from __future__ import annotations

import argparse
import gzip
import json
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.gpu import graphs, kernels, model, sections
from benchmarks.gpu.__main__ import command_of, missing_tools, parse
from benchmarks.gpu.limits import GOALS, H200, cost_of
from benchmarks.gpu.profile import idle_share_in, kernels_in
from benchmarks.gpu.session import Session
from benchmarks.gpu.table import Row, exit_code, lines_of
from benchmarks.record import Recorder
from src.core.settings import CHECKOUT
from src.core.steps import StepRecord
from src.engine import startup
from src.engine.execution.graphs import DecodeGraph
from src.engine.sizing.roofline import Roofline
from src.ops import GUMBEL_ARGMAX, PAGED_ATTENTION, Op
from src.ops.declaration import Kernel
from tests.support.fake_capture import FakeCapture

ON_CPU = ["--device", "cpu", "--shape", "tiny", "--quick", "--eager", "--repeats", "1", "--no-save"]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    options, recorder = parse(ON_CPU), Recorder("gpu", save=False, prints=False)
    return Session(options, recorder, tmp_path / "rows", time.monotonic() + 100)


def told(tmp_path: Path) -> dict[str, Row]:
    lines = (tmp_path / "rows").read_bytes().splitlines()
    rows = [msgspec.json.decode(line, type=Row) for line in lines]
    return {row.figure: row for row in rows}


# Limits and goals


def test_what_eight_billion_parameters_cost() -> None:
    cost = cost_of("8b")
    assert cost.weight_bytes == cost.layer_flops + cost.head_flops
    assert cost.weight_bytes == pytest.approx(15.01e9, rel=1e-3)
    assert cost.layer_flops == pytest.approx(13.96e9, rel=1e-3)
    assert (cost.pair_flops / 2, cost.kv_bytes) == (262_144, 131_072)


@pytest.mark.parametrize(("rows", "limit"), [(1, 3.5), (8, 3.7), (64, 5.5), (256, 12.9)])
def test_the_least_time_of_a_step_on_an_h200(rows: int, limit: float) -> None:
    milliseconds = 1000 * cost_of("8b").decode_seconds(rows, 1024, H200)
    assert milliseconds == pytest.approx(limit, abs=0.06)
    assert 0.7 < milliseconds / GOALS.inter_token_ms[rows] < 1


def test_the_other_goals_are_below_what_an_h200_allows() -> None:
    cost = cost_of("8b")
    assert GOALS.prefill_tflops < H200.flops / 1e12
    most = 256 * 1000 / cost.offline_seconds(256, 1000, 1000, H200)
    assert 0.7 < GOALS.offline / most < 1
    # All tokens of a prompt attend to half of it on average.
    assert cost.prefill_flops(2048) == 2048 * (cost.layer_flops + 262_144 * 2048)


def test_goals_of_another_device_are_as_far_from_its_limits() -> None:
    cost = cost_of("8b")
    assert GOALS.on(H200, cost) == GOALS
    half = Roofline(bandwidth=H200.bandwidth / 2, flops=H200.flops)
    slower = GOALS.on(half, cost)
    assert slower.inter_token_ms[1] == pytest.approx(2 * GOALS.inter_token_ms[1])
    assert slower.prefill_tflops == GOALS.prefill_tflops
    both = Roofline(bandwidth=H200.bandwidth / 2, flops=H200.flops / 2)
    assert GOALS.on(both, cost).offline == pytest.approx(GOALS.offline / 2)
    assert GOALS.on(both, cost).prefill_tflops == pytest.approx(GOALS.prefill_tflops / 2)
    assert (slower.bubble, slower.cold, slower.warm) == (GOALS.bubble, GOALS.cold, GOALS.warm)


# The table


def test_a_row_says_whether_its_goal_was_met() -> None:
    falls = Row("step", "ms", 4.0, goal=4.2, limit=3.0)
    rises = Row("rate", "tok/s", 8000.0, goal=9000.0, limit=10_000.0, rises=True)
    assert (falls.met, falls.of_limit) == (True, 0.75)
    assert (rises.met, rises.of_limit) == (False, 0.8)
    assert Row("told", "ms", 4.0).met is None
    lines = lines_of([falls, rises, Row("lost", outcome="not run", note="no time")])
    assert lines[2].split() == ["step", "4", "ms", "4.2", "ms", "3", "ms", "75", "%", "yes"]
    assert lines[3].endswith("80 %  NO")
    assert lines[4].split() == ["lost", "not", "run"]
    assert lines[5] == "lost: no time"


def test_the_exit_code_tells_what_is_missing_before_what_was_missed() -> None:
    met, missed = Row("a", measured=1.0, goal=1.0), Row("b", measured=2.0, goal=1.0)
    assert exit_code([met, Row("c", outcome="impossible")]) == 0
    assert exit_code([met, missed]) == 3
    assert exit_code([missed, Row("c", outcome="failed")]) == 1
    assert exit_code([missed, Row("c", outcome="not run")]) == 1


# What is measured of a model


def step(number: int, rows: int, context: int, *, prefill: int = 0, end: float = 0.0) -> StepRecord:
    zeros = dict.fromkeys(StepRecord.__struct_fields__, 0)
    return StepRecord(
        **zeros
        | {
            "step_id": number,
            "decode_rows": rows,
            "num_tokens": rows + prefill,
            "prefill_tokens": prefill,
            "context_tokens": rows * context + prefill,
            "device_start": end - 0.9,
            "device_end": end,
        }
    )


def test_a_window_has_nothing_but_rows_that_decode_near_the_context() -> None:
    steps = [step(i, 2, 100 + i, prefill=8 if i < 10 else 0) for i in range(30)]
    found = model.window(steps, 2, context=120, length=5)
    assert [s.step_id for s in found] == [18, 19, 20, 21, 22]
    assert [s.step_id for s in model.window(steps, 2, 100, 5)] == [10, 11, 12, 13, 14]
    with pytest.raises(RuntimeError, match="no 5 steps of 3 decoding rows"):
        model.window(steps, 3, 100, 5)


def test_a_bubble_is_the_time_between_the_ends_without_a_step() -> None:
    steps = [step(i, 1, 10, end=i * 1.2) for i in range(5)]
    seconds, share = model.waiting(steps)
    assert seconds == pytest.approx(1.2)
    assert share == pytest.approx(0.25)


def test_kernels_are_counted_by_their_category() -> None:
    events = [
        {"cat": "kernel", "dur": 500_000},
        {"cat": "kernel", "dur": 250_000},
        {"cat": "gpu_memcpy", "dur": 9},
        {"ph": "M"},
    ]
    trace = gzip.compress(json.dumps({"traceEvents": events}).encode())
    found = kernels_in(trace, "kernel")
    assert (found.count, found.seconds) == (2, 0.75)
    assert (found - found.per(2)).count == 1


def test_the_device_is_idle_where_nothing_runs_in_the_later_half() -> None:
    def trace(*events: tuple[str, float, float]) -> bytes:
        named = [{"cat": cat, "ts": ts, "dur": dur} for cat, ts, dur in events]
        return gzip.compress(json.dumps({"traceEvents": [{"ph": "M"}, *named]}).encode())

    led_there = [("kernel", 10.0 * i, 1.0) for i in range(4)]
    # From 100 to 200: 20 and 10 without anything, a copy beside a kernel, a kernel within another.
    later = [
        ("kernel", 100, 30),
        ("gpu_memcpy", 120, 20),
        ("kernel", 160, 30),
        ("kernel", 165, 10),
        ("kernel", 200, 0),
    ]
    unordered = [*reversed(later), ("cpu_op", 0, 1000), *led_there]
    found = idle_share_in(trace(*unordered), ("kernel", "gpu_memcpy"))
    assert found == pytest.approx(0.30)
    # Without copies the device seems idle for 10 more.
    assert idle_share_in(trace(*unordered), ["kernel"]) == pytest.approx(0.40)
    with pytest.raises(RuntimeError, match="the profiler saw 1 of kernel"):
        idle_share_in(trace(("kernel", 0, 1)), ["kernel"])


# Mistakes are found


def small_cases(*, quick: bool) -> dict[str, tuple[Op, dict[str, Any]]]:
    return {
        "attention": (PAGED_ATTENTION, {"rows": [(1, 40), (5, 20)], "dtype": torch.bfloat16}),
        "sampling": (GUMBEL_ARGMAX, {"rows": 4, "vocab_size": 100}),
    }


def test_a_wrong_kernel_fails_its_own_figure_alone(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> None:
        PAGED_ATTENTION.reference(*arguments)
        arguments[9].mul_(1.3)

    monkeypatch.setattr(kernels, "cases", small_cases)
    # Built already when the section looks, so that nothing takes the wrong one's place.
    kernels.ensure_built(wait=True)
    before = PAGED_ATTENTION.active("cpu")
    monkeypatch.setattr(kernels, "ensure_built", lambda wait: "built")
    PAGED_ATTENTION.install_cpu(Kernel("wrong", wrong))
    try:
        kernels.run(session)
    finally:
        PAGED_ATTENTION.install_cpu(before)
    rows = told(tmp_path)
    assert rows["attention"].outcome == "failed"
    assert "differs from its reference by" in rows["attention"].note
    assert rows["sampling"].measured
    assert rows[kernels.EQUAL].measured == 1
    assert rows[kernels.EQUAL].met is False


def test_a_section_out_of_time_has_told_how_many_ops_were_equal(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "cases", small_cases)
    monkeypatch.setattr(kernels, "_time", killed)
    with pytest.raises(KeyboardInterrupt):
        kernels.run(session)
    assert told(tmp_path)[kernels.EQUAL].measured == 1


def test_captured_steps_are_held_against_transformers(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "capture_backend", lambda device: FakeCapture())
    monkeypatch.setattr(graphs, "_MOST_TOKENS", 16)
    graphs.run(session)
    rows = told(tmp_path)
    assert set(rows) == set(graphs.figures(session.options))
    assert not [row for row in rows.values() if row.outcome != "measured" or row.met is False]


def test_a_graph_that_computes_something_else_is_seen(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DecodeGraph.run

    def stale(self: DecodeGraph, numbers: Any, *more: Any) -> Any:
        # As if the graph still had the position of an earlier step, behind lengths and rows.
        numbers[2 * self.num_rows + 1] -= 1
        return run(self, numbers, *more)

    monkeypatch.setattr(startup, "capture_backend", lambda device: FakeCapture())
    monkeypatch.setattr(DecodeGraph, "run", stale)
    monkeypatch.setattr(graphs, "_MOST_TOKENS", 16)
    monkeypatch.setattr(graphs, "_DTYPES", (torch.float32,))
    graphs.run(session)
    with_graphs, without, changed = (told(tmp_path)[name] for name in graphs.figures(None))
    assert without.met
    assert with_graphs.met is False
    assert changed.met is False


# Time, and processes that do not end well


def program(folder: Path, text: str) -> str:
    """A program in Python's place; ``$rows`` is where its rows go."""
    path = folder / "program"
    find = 'while [ "$1" != --rows ]; do shift; done; rows="$2"\n'
    path.write_text(f"#!/bin/sh\n{find}{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def run_start(options: argparse.Namespace) -> list[Row]:
    return sections.run_in_turn(options, ["start"], ON_CPU)


def test_what_does_not_fit_is_named() -> None:
    rows = run_start(parse([*ON_CPU, "--budget-seconds", "3"]))
    assert [(row.outcome, row.note) for row in rows] == 2 * [
        ("not run", "start takes 60 s, 3 s were left")
    ]


def test_a_section_that_dies_has_told_what_it_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sections.SECTIONS["start"].figures(parse(ON_CPU))
    line = msgspec.json.encode(Row(first, "s", 2.0)).decode()
    text = f"printf '%s\\n{{\"half' '{line}' > \"$rows\"; exit 7"
    monkeypatch.setattr(sys, "executable", program(tmp_path, text))
    rows = run_start(parse(ON_CPU))
    assert rows[0] == Row(first, "s", 2.0)
    assert rows[1] == Row(second, outcome="failed", note="the section start ended with 7")


def test_a_section_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    monkeypatch.setattr(sys, "executable", program(tmp_path, text))
    monkeypatch.setattr(sections, "_QUICK_SECONDS", 1.0)
    begun = time.monotonic()
    rows = run_start(parse(ON_CPU))
    assert time.monotonic() - begun < 20
    assert {row.note for row in rows} == {"the section start took longer than 2 s"}
    # A process that is a zombie until its new parent looks still counts as one.
    started = Path("/proc") / (tmp_path / "pid").read_text().strip()
    while started.exists() and "\nState:\tZ" not in (started / "status").read_text():
        assert time.monotonic() - begun < 20
        time.sleep(0.05)


def test_what_ends_the_command_ends_the_section_that_runs(tmp_path: Path) -> None:
    """A device that a forgotten section keeps busy spoils whatever is measured next."""
    text = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 600"
    script = (
        "import sys; from benchmarks.gpu.__main__ import main;"
        f"sys.executable = {program(tmp_path, text)!r}; sys.exit(main())"
    )
    command = [sys.executable, "-c", script, *ON_CPU, "--only", "start"]
    process = subprocess.Popen(command, cwd=CHECKOUT)
    try:
        begun = time.monotonic()
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            assert time.monotonic() - begun < 60
            time.sleep(0.05)
        section = Path("/proc") / (tmp_path / "pid").read_text().strip() / "status"
        process.terminate()
        assert process.wait(20) == 143
        while section.exists() and "\nState:\tZ" not in section.read_text():
            assert time.monotonic() - begun < 90
            time.sleep(0.05)
    finally:
        process.kill()


def test_the_figures_that_are_asked_for_are_measured_first() -> None:
    """Of a few minutes, whatever the other sections take."""
    first, *_ = sections.SECTIONS.values()
    assert first.name == "model"
    assert first.expected(parse(["--budget-seconds", "200"])) <= 200


# The whole


def test_the_command_that_is_recorded_is_the_one_that_was_given() -> None:
    hidden = ["--section", "start", "--rows", "/some/rows", "--until", "5.0"]
    for arguments in (ON_CPU, [*ON_CPU, *hidden]):
        recorded = command_of(parse(arguments), arguments)
        assert recorded == "python -m benchmarks.gpu " + " ".join(ON_CPU)


@pytest.mark.slow
def test_every_section_runs_on_a_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *ON_CPU],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.index("figure  ") :].splitlines()
    options = parse(ON_CPU)
    figures = [name for s in sections.SECTIONS.values() for name in s.figures(options)]
    shown = table[2 : 2 + len(figures)]
    assert [line.split("  ")[0] for line in shown] == figures
    impossible = {line.split("  ")[0] for line in shown if line.endswith("impossible")}
    assert impossible == {name for name in graphs.figures(options) if "no graphs" not in name}


def test_what_triton_needs_and_does_not_find_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert missing_tools() == []
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    (named,) = missing_tools()
    assert named.startswith("Python.h")
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    (named,) = missing_tools()
    assert "cannot be run" in named
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    (named,) = missing_tools()
    assert named.startswith("a C compiler")
