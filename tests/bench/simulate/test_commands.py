"""``bench calibrate`` and ``bench simulate`` from their arguments to their figures."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from src.bench.simulate.calibration import Calibration, calibration_of, load, save
from src.bench.simulate.step_cost import MIN_STEPS, Price, Work
from src.cli.bench import calibrate, plot, simulate, soak
from src.cli.main import main
from src.cli.options import CommandModule
from src.core.config import Config
from src.core.errors import ConfigError
from src.core.settings import CHECKOUT
from tests.bench.simulate.prices import LIMITS, cost_of, record

DEVICE = Price(step=0.010, decode_rows=0.001, prefill_tokens=0.0005)
LOAD = ("--num-prompts", "60", "--random-input-len", "20", "--random-output-len", "10")


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    file = tmp_path / "cost.json"
    found = Calibration(
        model="made up", source="a test", limits=LIMITS, pipeline_depth=2, cost=cost_of(DEVICE)
    )
    save(found, file)
    assert load(file) == found
    return file


def lines_of(out: str) -> list[list[str]]:
    return [re.split(r"\s\s+", line.strip()) for line in out.splitlines()]


def test_one_run_is_one_line(calibration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simulate", "--calibration", str(calibration), *LOAD]) == 0
    heading, figures = lines_of(capsys.readouterr().out)
    found = dict(zip(heading, figures, strict=False))
    assert float(found["req/s"]) > 0
    assert found["refused"] == "0"
    assert found["good/s"] == "-"


def test_every_combination_is_a_line(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.json"
    code = main(
        ["bench", "simulate", "--calibration", str(calibration), *LOAD, "--no-scatter",
         "--vary", "max_num_seqs=2,8", "--vary", "replicas=1,2", "--jobs", "1",
         "--goodput", "ttft:10000", "--output-json", str(output)]
    )  # fmt: skip
    assert code == 0
    heading, *figures = lines_of(capsys.readouterr().out)
    assert heading[:2] == ["max_num_seqs", "replicas"]
    assert [line[:2] for line in figures] == [["2", "1"], ["2", "2"], ["8", "1"], ["8", "2"]]
    rows = json.loads(output.read_text())
    rates = [row["outcome"]["request_throughput"] for row in rows]
    assert rates[0] < rates[1] < rates[3]
    assert rates[0] < rates[2]
    # All of them were good.
    assert [row["outcome"]["request_goodput"] for row in rows] == rates


def test_runs_in_processes_of_their_own_say_the_same(
    calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for jobs in ("1", "2"):
        main(["bench", "simulate", "--calibration", str(calibration), *LOAD,
              "--vary", "request_rate=5,20", "--jobs", jobs])  # fmt: skip
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_the_greatest_rate_keeps_the_promise(
    calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "simulate", "--calibration", str(calibration), *LOAD, "--no-scatter"]
    goodput = ["--goodput", "ttft:60"]
    assert main([*arguments, *goodput, "--find-rate", "95"]) == 0
    heading, figures = lines_of(capsys.readouterr().out)
    rate = float(dict(zip(heading, figures, strict=False))["found request_rate"])
    good = []
    for factor in (1.0, 1.5):
        main([*arguments, *goodput, "--request-rate", str(rate * factor)])
        heading, figures = lines_of(capsys.readouterr().out)
        found = dict(zip(heading, figures, strict=False))
        good.append(float(found["good/s"]) / float(found["req/s"]))
    assert good[0] >= 0.94
    assert good[1] < 0.95


def test_a_recorded_trace_is_served(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * i, "input_length": 40, "output_length": 4, "hash_ids": [1, 2, 10 + i]}
        for i in range(5)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    code = main(
        ["bench", "simulate", "--calibration", str(calibration), "--trace", str(trace),
         "--timed-trace-sec-multiplier", "0.001", "--timed-trace-chunk-hash-size", "16"]
    )  # fmt: skip
    assert code == 0
    heading, figures = lines_of(capsys.readouterr().out)
    found = dict(zip(heading, figures, strict=False))
    assert float(found["req/s"]) == pytest.approx(5 / 4.07, rel=0.02)
    # Two chunks of 16 tokens are everybody's.
    assert found["cached"] == f"{100 * 4 * 32 / (5 * 40):.0f} %"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vary", "nothing=1"], "unknown name nothing"),
        (["--vary", "max_drafts=4"], "no step of the calibration had drafts"),
        (["--vary", "max_num_seqs=many"], "max_num_seqs must be int"),
        (["--vary", "max_num_seqs=0"], "max_num_seqs must be at least 1"),
        (["--vary", "routing=nowhere"], "routing must be round-robin or least-requests"),
        (["--vary", "replicas=0"], "at least 1 replica"),
        (["--find-rate", "99"], "needs objectives"),
        (["--find-rate", "99", "--goodput", "ttft:1"], "not even a lone request"),
        (["--random-range-ratio", "1"], "--random-range-ratio"),
        (["--random-input-len", "0"], "the input length"),
        (["--max-tokens", "2"], "below the longest output"),
        (["--trace", "nowhere.jsonl"], "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_refused(
    calibration: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code = main(["bench", "simulate", "--calibration", str(calibration), *LOAD, *arguments])
    assert code == 2
    assert words in capsys.readouterr().err


def test_another_file_is_no_calibration(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="not a file of `bench calibrate`"):
        load(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "missing.json")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("settings", [(), ("--set", "speculation.method=auto")])
def test_an_engine_here_is_calibrated(
    settings: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps have no drafts, whatever the default is."""
    file = tmp_path / "cost.json"
    demo = str(CHECKOUT / "configs" / "demo.toml")
    code = main(
        ["bench", "calibrate", "--config", demo, "--set", "compile.startup=off", *settings,
         "--set", "observability.log_level=warning", "--duration", "0.5", "-o", str(file)]
    )  # fmt: skip
    assert code == 0
    found = load(file)
    assert found.model == "demo"
    assert found.limits.max_num_seqs == 64
    assert found.cost.num_steps >= MIN_STEPS
    assert found.cost.device != Price()
    assert found.cost.submit > 0
    out = capsys.readouterr().out
    assert "device" in out
    assert "handover" in out
    # What was found is good for a simulation.
    assert main(["bench", "simulate", "--calibration", str(file), *LOAD]) == 0


@pytest.mark.parametrize("method", ["suffix", "mtp"])
def test_an_engine_that_is_to_draft_is_not_calibrated(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = str(CHECKOUT / "configs" / "demo.toml")
    drafts = f"speculation.method={method}"
    assert main(["bench", "calibrate", "--config", demo, "--set", drafts]) == 2
    told = capsys.readouterr().err
    assert f"speculation.method = {method}: bench calibrate prices steps without drafts" in told


@pytest.mark.parametrize("drafted", [0, 2])
def test_steps_with_drafts_make_an_engine_that_drafts(drafted: int) -> None:
    pool: Any = SimpleNamespace(block_size=4, num_blocks=96, windows=[None], whole_prompts=False)
    work = Work(1, 0, 0, 40, 0, 1, drafted_tokens=drafted)
    steps = [record(at, work, float(at), 0.01, accepted=drafted // 2) for at in range(1, 60)]
    view: Any = SimpleNamespace(steps=steps, requests=[])
    found = calibration_of(
        *(view, pool, Config()), model="m", max_model_len=64, device_type="cpu", source=""
    )
    assert found.limits.max_drafts == (16 if drafted else 0)
    assert (found.cost.drafted, found.cost.accepted) == (drafted, drafted // 2)


def test_what_drafts_bring_is_simulated(calibration: Path, tmp_path: Path) -> None:
    found = load(calibration)
    cost = msgspec.structs.replace(found.cost, drafted=2.0, accepted=1.0)
    limits = msgspec.structs.replace(found.limits, max_drafts=4)
    drafting, shown = tmp_path / "drafting.json", tmp_path / "shown.json"
    changed = msgspec.structs.replace(found, cost=cost, limits=limits)
    drafting.write_bytes(msgspec.json.encode(changed))
    asked = ["bench", "simulate", "--calibration", str(drafting), *LOAD]
    assert main([*asked, "--vary", "max_drafts=0,4", "--output-json", str(shown)]) == 0
    without, with_drafts = [row["outcome"]["tpot"]["mean"] for row in json.loads(shown.read_text())]
    assert with_drafts < 0.9 * without


def test_every_line_and_unit_of_what_is_printed_is_described() -> None:
    everything = Price(**dict.fromkeys(msgspec.structs.asdict(Price()), 1.0))
    cost = cost_of(everything, plan=everything, dispatch=1.0, submit=1.0)
    found = Calibration(
        model="made up", source="a test", limits=LIMITS, pipeline_depth=2, cost=cost
    )
    _, _, *lines = calibrate.price_lines(found)
    units = re.findall(r"([a-z ]+?) 1e\+06", lines[0])
    assert "sampled row" in [unit.strip() for unit in units]
    page = (CHECKOUT / "docs" / "simulation.md").read_text()
    rows = {
        name.strip("` ")
        for cell in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
        for name in cell.split(",")
    }
    printed = {line.split()[0] for line in lines} | {unit.strip() for unit in units}
    assert printed - rows == set()


def test_a_duration_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "calibrate", "--duration", "0"]) == 2
    assert main(["bench", "soak", "--duration", "-1"]) == 2
    assert "--duration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "pages"),
    [
        (calibrate, ["simulation", "configuration"]),
        (simulate, ["simulation", "benchmarks"]),
        (plot, ["simulation"]),
        (soak, ["soak", "configuration"]),
    ],
)
def test_every_option_is_described(module: CommandModule, pages: list[str]) -> None:
    text = "".join((CHECKOUT / "docs" / f"{page}.md").read_text() for page in pages)
    kinds = argparse.ArgumentParser().add_subparsers()
    module.add_command(kinds)
    parsers = list(kinds.choices.values())
    for parser in parsers:
        for action in parser._actions:
            # The pictures have parsers of their own.
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    options = {
        option
        for parser in parsers
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    }
    assert len(options) > 2
    assert not options - set(re.findall(r"--[a-z][a-z-]*", text))
