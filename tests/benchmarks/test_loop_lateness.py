"""How late the event loop is while helpers of the kernels compute and keep watch."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import loop_lateness
from benchmarks.loop_lateness import while_decoding, while_idle
from benchmarks.record import percentile
from src import AsyncEngine, Config
from src.core.cpus import usable_cpus
from src.ops.build.kernels import ensure_built
from tests.benchmarks.conftest import Lines
from tests.support.engines import small_config

DEMO = Path(__file__).parents[2] / "configs" / "demo"
# With compilers, where nothing is in the cache.
pytestmark = pytest.mark.timeout(900)


def config_with(threads: int) -> Config:
    """Of code that is compiled for other tests as well."""
    return small_config(
        DEMO,
        device__num_threads=threads,
        compile__enforce_eager=False,
        compile__startup="wait",
        cache__block_size=16,
        scheduler__max_num_seqs=64,
    )


@pytest.mark.anyio
async def test_a_loop_that_is_held_up_is_late() -> None:
    task = asyncio.create_task(while_idle(0.2))
    await asyncio.sleep(0.05)
    time.sleep(0.05)  # noqa: ASYNC251 - the loop is to be late
    late = await task
    assert max(late) >= 0.04
    assert len(late) > 20


@contextlib.contextmanager
def computing(count: int) -> Iterator[None]:
    """So many threads compute without Python's lock, and neither watch nor wait."""
    ended, content = threading.Event(), bytes(2**20)

    def compute() -> None:
        while not ended.is_set():
            hashlib.sha256(content)

    threads = [threading.Thread(target=compute) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.anyio
async def test_helpers_that_keep_watch_starve_no_loop_and_sleep_afterwards() -> None:
    """The loop is no later than beside as many threads that compute and do not watch.

    With as many threads as CPUs, a hundredth of the sleeps of a millisecond is 1 ms late.
    Helpers that watch without end take 0.3 s of every 0.3, whether they offer their CPU or not.
    What else runs on the machine, and what a machine takes away from those that compute, makes
    the loop late as well, but in the control too, and hardly at every attempt.
    """
    ensure_built(wait=True)
    threads = max(2, usable_cpus())
    late, used = [], []
    async with (
        AsyncEngine.open(config_with(threads)) as engine,
        AsyncEngine.open(config_with(1)) as alone,
    ):
        for each in (engine, alone):
            await while_decoding(each, 8, 50, seed=0)
        for attempt in range(8):
            busy, _ = await while_decoding(engine, 8, 400, seed=1 + attempt)
            started = time.process_time()
            await while_idle(0.3)
            used.append(time.process_time() - started)
            with computing(threads - 1):
                control, _ = await while_decoding(alone, 8, 400, seed=1 + attempt)
            late.append(percentile(busy, 0.99) - percentile(control, 0.99))
            if min(late) < 0.0025 and min(used) < 0.1:
                break
    assert min(late) < 0.0025, late
    assert min(used) < 0.1, used


def test_the_command_records_a_line_per_number_of_rows_and_threads(
    results: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def configuration(_: Path, threads: int) -> Config:
        asked.append(threads)
        return config_with(threads)

    monkeypatch.setattr(loop_lateness, "configuration", configuration)
    monkeypatch.setattr(loop_lateness, "usable_cpus", lambda: 2)
    sizes = ["--seconds", "0.1", "--repeats", "2"]
    loop_lateness.main(["--shape", "tiny", "--rows", "1", "3", *sizes])
    assert asked == [1, 2]
    lines = results("loop_lateness")
    assert [(line["threads"], line["rows"]) for line in lines] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    for line in lines:
        figures = {name: figure["median"] for name, figure in line["figures"].items()}
        assert 0 <= figures["p50"] <= figures["p99"] <= figures["max"]
        assert figures["tpot"] > 0
