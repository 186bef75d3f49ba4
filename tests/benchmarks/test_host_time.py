"""Clocks around methods, and the host's time per step of a small engine."""

from __future__ import annotations

import gc
import json
import threading
import time
from pathlib import Path

import pytest

from benchmarks import host_time
from benchmarks.clocks import Clocks
from src import Config
from src.engine.loop import EngineLoop
from src.engine.scheduling.scheduler import Scheduler
from tests.benchmarks.conftest import Lines
from tests.support.engines import small_config

DEMO = Path(__file__).parents[2] / "configs" / "demo"


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Work:
    def outer(self) -> str:
        burn(0.01)
        self.inner()
        return "done"

    def inner(self) -> None:
        burn(0.03)


def test_what_is_called_is_counted_for_the_inner_call_only() -> None:
    clocks = Clocks()
    clocks.measure("outer", Work, "outer")
    clocks.measure("inner", Work, "inner")
    try:
        # A machine may count as computed what it gave to others, but hardly every time.
        for _ in range(5):
            clocks.clear()
            assert Work().outer() == "done"
            (outer,), (inner,) = clocks.values["outer"], clocks.values["inner"]
            if outer < 0.03:
                break
    finally:
        clocks.close()
    assert 0.01 <= outer < 0.03 <= inner
    Work().outer()
    assert len(clocks.values["outer"]) == 1


def test_threads_do_not_count_for_each_other() -> None:
    work, clocks = Work(), Clocks()
    clocks.measure("outer", work, "outer")
    clocks.measure("inner", work, "inner")
    thread = threading.Thread(target=work.inner)
    thread.start()
    work.outer()
    thread.join()
    clocks.close()
    assert clocks.values["outer"][0] >= 0.01
    assert len(clocks.values["inner"]) == 2
    assert "outer" not in vars(work)


def test_calls_that_came_to_nothing_are_left_out() -> None:
    clocks = Clocks()
    clocks.measure("inner", Work, "inner", keeps=lambda result: result is not None)
    clocks.measure("outer", Work, "outer", keeps=lambda result: result is not None)
    for _ in range(5):
        Work().outer()
    clocks.close()
    assert clocks.values["inner"] == []
    assert min(clocks.values["outer"]) < 0.03
    clocks.clear()
    assert clocks.values["outer"] == []


@pytest.fixture
def config() -> Config:
    """Of code that is compiled for other tests as well."""
    return small_config(
        DEMO,
        compile__enforce_eager=False,
        compile__startup="wait",
        cache__block_size=16,
        scheduler__max_num_seqs=64,
    )


@pytest.mark.anyio
@pytest.mark.timeout(900)  # of which compilers take most, where nothing is in the cache
async def test_every_phase_of_decoding_steps_is_measured(config: Config) -> None:
    methods = EngineLoop._launch, Scheduler.schedule
    repeats = await host_time.measure(config, rows=4, steps=40, repeats=2)
    assert (EngineLoop._launch, Scheduler.schedule) == methods
    assert gc.get_freeze_count() == 0
    assert len(repeats) == 2
    for values in repeats:
        assert values.keys() == host_time.FIGURES.keys()
        assert all(0 < values[f"{name}_p50"] <= values[f"{name}_p99"] for name in host_time.PHASES)
        assert values["total_p50"] > max(values[f"{name}_p50"] for name in host_time.PHASES)
        # A forward pass of this model takes longer than what is around it on its thread.
        around = sum(values[f"{name}_p50"] for name in ("inputs", "read", "hand_over"))
        assert values["device_p50"] > around


@pytest.mark.anyio
async def test_uncompiled_code_is_not_measured() -> None:
    config = small_config(DEMO, compile__enforce_eager=True)
    with pytest.raises(RuntimeError, match="uncompiled"):
        await host_time.measure(config, rows=2, steps=4, repeats=1)


@pytest.mark.timeout(900)
def test_the_command_records_a_line_per_shape(
    results: Lines, monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    asked: list[tuple[int, int]] = []

    def configuration(directory: Path, rows: int) -> Config:
        layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
        asked.append((layers, rows))
        return config

    monkeypatch.setattr(host_time, "configuration", configuration)
    sizes = ["--rows", "3", "--steps", "20", "--repeats", "2"]
    host_time.main(["--shape", "tiny", "7m", *sizes])
    assert asked == [(2, 3), (4, 3)]
    lines = results("host_time")
    assert [(line["shape"], line["rows"], line["steps"]) for line in lines] == [
        ("tiny", 3, 20),
        ("7m", 3, 20),
    ]
    for line in lines:
        assert line["figures"]["total_p50"]["repeats"] == 2
        assert line["figures"]["total_p99"]["unit"] == "us"
        assert line["command"].startswith("python -m benchmarks.host_time")


def test_the_configuration_is_one_of_compiled_code(tmp_path: Path) -> None:
    config = host_time.configuration(tmp_path, 96)
    assert (config.compile.startup, config.scheduler.max_num_seqs) == ("wait", 96)
