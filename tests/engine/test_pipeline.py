"""The pipeline: the host works while the device does, and a fault stays where it belongs."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from src import AsyncEngine, GenerationResult, SamplingParams
from src.core.errors import ConfigError, EngineDeadError, ModelLoadError
from src.core.plan import StepPlan
from src.core.steps import StepRecord
from src.engine import startup
from src.engine.execution.row_owners import RowOwners
from src.engine.execution.step_computer import StepComputer
from src.engine.execution.step_results import StepResults
from src.engine.execution.warm_up import KERNEL_WARM_UP_TOKENS
from src.engine.execution.worker import Worker
from src.engine.loading import Loaded, Loading
from src.engine.sampling import truncation
from src.engine.scheduling.scheduler import Scheduler
from src.text.output import OutputText
from tests.support.engines import assert_idle, small_config
from tests.support.probe import Probe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


async def run_and_record(engine: AsyncEngine, max_tokens: int = 40) -> list[StepRecord]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    results = await asyncio.gather(*(engine.generate([5 + i, 6, 7], params) for i in range(4)))
    assert all(len(result.token_ids) == max_tokens for result in results)
    assert_idle(engine)
    return list(engine.timeline)


@pytest.mark.parametrize("depth", [1, 2])
async def test_the_next_step_is_planned_and_launched_while_this_one_runs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """The device does not end a step before the next one is launched: at depth 1 it waits in vain.

    No clock decides this but the time-out of a wait that nobody ends.
    """
    launched = threading.Semaphore(0)
    waited_in_vain: list[int] = []
    launch, compute = Worker.launch, StepComputer.compute
    step = 0

    def counting_launch(self: Worker, *arguments: Any, **named: Any) -> Any:
        in_flight = launch(self, *arguments, **named)
        launched.release()
        return in_flight

    def patient_compute(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        nonlocal step
        step += 1
        if step == 1:
            launched.acquire()
        if not launched.acquire(timeout=20 if depth == 2 and step < 6 else 0.2):
            waited_in_vain.append(step)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(Worker, "launch", counting_launch)
    monkeypatch.setattr(StepComputer, "compute", patient_compute)
    config = small_config(checkpoint, scheduler__pipeline_depth=depth)
    async with AsyncEngine.open(config) as engine:
        records = await run_and_record(engine, max_tokens=6)
    if depth == 2:
        assert waited_in_vain == [len(records)]  # nothing follows the last step
        assert all(b.launched < a.device_end for a, b in pairwise(records))
    else:
        assert 1 in waited_in_vain
        assert all(b.planned >= a.device_end for a, b in pairwise(records))


async def test_a_step_that_is_planned_late_is_launched_in_time_and_computes_the_same(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come one after the other while steps take 50 ms; there is a row for each."""
    compute = StepComputer.compute

    def slow_compute(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        time.sleep(0.05)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", slow_compute)
    found = []
    # A machine that is busy with something else launches steps late as well, at some attempts.
    for _ in range(4):
        shares, early, late = await planned_both_ways(checkpoint)
        found.append((shares, early, late))
        if min(shares) > 0.7 and late < 0.7 * early:
            return
    pytest.fail(f"not in time, or not late: {found}")


async def planned_both_ways(checkpoint: Path) -> tuple[list[float], float, float]:
    """Shares of steps that were launched in time, and how long plans then wait, in seconds."""
    answers, queued, shares = [], [], []
    for plan_late in (False, True):
        config = small_config(checkpoint, scheduler__plan_late=plan_late, scheduler__max_num_seqs=8)
        async with AsyncEngine.open(config) as engine:
            tasks = []
            for number in range(7):
                tasks.append(asyncio.create_task(engine.generate([5 + number, 6, 7], LONG)))
                await asyncio.sleep(0.07)
            answers.append([result.token_ids for result in await asyncio.gather(*tasks)])
            assert_idle(engine)
            records = list(engine.timeline)
        # How long the plan of a step waits for the device.
        queued.append(statistics.median(r.device_start - r.launched for r in records))
        in_time = [b.launched < a.device_end for a, b in pairwise(records)]
        shares.append(sum(in_time) / len(in_time))
    assert answers[0] == answers[1]
    early, late = queued
    return shares, early, late


async def test_the_records_say_how_much_the_device_idled(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a slow host and a slower device, depth 1 idles for the host's time; depth 2 hides it."""
    host, device, tokens = 0.03, 0.06, 12
    compute, schedule = StepComputer.compute, Scheduler.schedule

    def slow_compute(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        time.sleep(device)
        return compute(self, *arguments, **named)

    def slow_schedule(self: Scheduler) -> StepPlan | None:
        if self.has_work:
            time.sleep(host)
        return schedule(self)

    monkeypatch.setattr(StepComputer, "compute", slow_compute)
    monkeypatch.setattr(Scheduler, "schedule", slow_schedule)

    async def idled(depth: int) -> float:
        config = small_config(checkpoint, scheduler__pipeline_depth=depth)
        async with AsyncEngine.open(config) as engine:
            records = await run_and_record(engine, tokens)
            idle = sum(record.idle_before for record in records)
            busy = sum(record.device_end - record.device_start for record in records)
            assert busy >= device * tokens
            assert engine.timeline.bubble == pytest.approx(idle / (idle + busy))
        return idle

    shallow = await idled(1)
    assert shallow >= host * (tokens - 1)
    # A machine that is busy with something else lets the device wait as well, at some attempts.
    deep = []
    while min(deep, default=shallow) >= 0.5 * shallow and len(deep) < 4:
        deep.append(await idled(2))
    assert min(deep) < 0.5 * shallow, (shallow, deep)


async def test_steps_run_on_the_device_one_after_the_other(checkpoint: Path) -> None:
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        records = await run_and_record(engine)
    assert [record.step_id for record in records] == list(range(1, len(records) + 1))
    assert all(a.device_end <= b.device_start for a, b in pairwise(records))
    assert all(r.planned <= r.launched <= r.device_start <= r.device_end for r in records)


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> None:
    """Make the device fail in the steps whose count, from 1, ``fails`` says so of."""
    compute = StepComputer.compute
    steps = 0

    def failing_compute(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if fails(steps):
            raise RuntimeError(f"injected into step {steps}")
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", failing_compute)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_failed_step_fails_its_requests_and_nobody_else(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    failing(monkeypatch, lambda step: step == 5)
    config = small_config(checkpoint, scheduler__pipeline_depth=depth, scheduler__max_num_seqs=2)
    async with AsyncEngine.open(config) as engine:
        # Two rows: the other two requests wait, and are no part of the failed step.
        results = await asyncio.gather(
            *(engine.generate([5 + i, 6, 7], LONG) for i in range(4)), return_exceptions=True
        )
        assert [isinstance(result, EngineDeadError) for result in results] == [
            True,
            True,
            False,
            False,
        ]
        assert "injected into step 5" in str(results[0].__cause__)
        assert engine.status.ready
        after = await engine.generate([5, 6, 7], LONG)
        assert len(after.token_ids) == 40
        assert_idle(engine)


async def test_a_failed_step_does_not_take_those_down_who_join_its_row_mates(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests arrive in every step: the failed one's rows are in the next, with others."""
    compute = StepComputer.compute
    steps = 0

    def failing_compute(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        time.sleep(0.02)
        if steps == 6:
            raise RuntimeError("injected")
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", failing_compute)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async with AsyncEngine.open(small_config(checkpoint, scheduler__max_num_seqs=16)) as engine:
        tasks = []
        for index in range(13):
            tasks.append(asyncio.create_task(engine.generate([5 + index, 6, 7], params)))
            while steps <= index:
                await asyncio.sleep(0.001)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        assert 1 <= len(failed) <= 9
        assert all(isinstance(result, EngineDeadError) for result in failed)
        assert engine.status.ready
        assert_idle(engine)


async def test_a_fault_in_one_request_s_text_is_its_own(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = OutputText.go_on

    def failing(self: OutputText, token_ids: Sequence[int]) -> str:
        if self.num_tokens == 3 and self._min_tokens == 1:
            raise ValueError("injected")
        return go_on(self, token_ids)

    monkeypatch.setattr(OutputText, "go_on", failing)
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        good, bad = await asyncio.gather(
            engine.generate([5, 6, 7], LONG),
            engine.generate([5, 6, 8], msgspec.structs.replace(LONG, min_tokens=1)),
            return_exceptions=True,
        )
        assert isinstance(good, GenerationResult)
        assert len(good.token_ids) == 40
        assert isinstance(bad, EngineDeadError)
        assert engine.status.ready


async def test_a_device_that_keeps_failing_ends_the_engine(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda step: step >= 3)
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        while engine.status.ready:
            with pytest.raises((EngineDeadError, RuntimeError)):
                await engine.generate([5, 6, 7], LONG)
            await asyncio.sleep(0)
        error = await asyncio.wait_for(engine.wait_dead(), 30)
        assert "injected" in str(error)
        assert engine.status.phase == "failed"
        with pytest.raises(EngineDeadError):
            await engine.generate([5, 6, 7], LONG)


async def test_a_checkpoint_that_cannot_be_loaded_is_one_readable_reason(tmp_path: Path) -> None:
    engine = AsyncEngine(small_config(tmp_path))
    engine.start()
    with pytest.raises(ModelLoadError, match=r"expected tokenizer\.json|has no config\.json"):
        await engine.wait_ready()
    assert engine.status.phase == "failed"
    assert isinstance(await engine.wait_dead(), ModelLoadError)
    await engine.close()


async def test_closing_while_loading_leaves_no_thread(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    loaded = threading.Event()
    run = Loading.run

    def noting(self: Loading) -> Loaded | None:
        try:
            return run(self)
        finally:
            loaded.set()

    monkeypatch.setattr(Loading, "run", noting)
    engine = AsyncEngine(small_config(checkpoint))
    engine.start()
    await asyncio.sleep(0.01)
    await engine.close()
    assert engine.status.phase == "closed"
    # Who closes does not wait for the thread that loads, which may be at its first line yet.
    assert await asyncio.to_thread(loaded.wait, 60)
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("slipstream"):
            await asyncio.to_thread(thread.join, 30)
            assert not thread.is_alive(), thread.name


def open_files() -> set[str]:
    links = Path("/proc/self/fd")
    return {os.path.realpath(link) for link in links.iterdir()}


@pytest.mark.parametrize("part", ["allocate_kv_cache", "_settle_code", "RequestBuilder"])
async def test_a_start_that_fails_leaves_nothing_open(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    log = tmp_path / "plans.jsonl"
    before = set(threading.enumerate())

    def refuse(*arguments: Any, **options: Any) -> None:
        assert str(log) in open_files()
        raise ConfigError("injected")

    monkeypatch.setattr(startup, part, refuse)
    config = small_config(checkpoint, observability__plan_log=str(log))
    with pytest.raises(ConfigError, match="injected"):
        async with AsyncEngine.open(config):
            pass
    assert str(log) not in open_files()
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not names & {"slipstream-plan-log", "slipstream-device"}


class SlowStart:
    """Engines whose parts are there when ``release`` is set, and where those are closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.building = threading.Event()
        self.built: list[startup.EngineParts] = []
        self.closed_in: list[threading.Thread] = []
        self.closed = threading.Event()
        build, close = startup.build_engine, startup.EngineParts.close

        def slow_build(*arguments: Any) -> startup.EngineParts:
            parts = build(*arguments)
            self.built.append(parts)
            self.building.set()
            assert self.release.wait(60)
            return parts

        def noting(parts: startup.EngineParts) -> None:
            is_ours = any(parts is built for built in self.built)
            close(parts)
            # What an earlier test has given up may be closed as late as now.
            if is_ours:
                self.closed_in.append(threading.current_thread())
                self.closed.set()

        monkeypatch.setattr(startup, "build_engine", slow_build)
        monkeypatch.setattr(startup.EngineParts, "close", noting)

    async def until(self, event: threading.Event) -> None:
        while not event.is_set():
            await asyncio.sleep(0.001)

    def assert_closed_once_off_the_loop(self) -> None:
        assert len(self.closed_in) == 1
        assert self.closed_in[0] is not threading.current_thread()


async def test_what_is_built_for_nobody_is_closed_by_the_thread_that_built_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = SlowStart(monkeypatch)
    engine = AsyncEngine(small_config(checkpoint))
    engine.start()
    await start.until(start.building)
    await engine.close()
    assert not start.closed_in
    start.release.set()
    await start.until(start.closed)
    start.assert_closed_once_off_the_loop()
    assert engine.metrics._source is None, "that would keep the model alive"


async def test_what_is_built_as_the_engine_closes_is_closed_with_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = SlowStart(monkeypatch)
    handed_over = threading.Event()
    run = Loading.run

    def noting(self: Loading) -> Loaded | None:
        loaded = run(self)
        handed_over.set()
        return loaded

    monkeypatch.setattr(Loading, "run", noting)
    engine = AsyncEngine(small_config(checkpoint))
    engine.start()
    await start.until(start.building)
    start.release.set()
    # The loop does not turn meanwhile, so it takes nothing.
    assert handed_over.wait(60)
    await engine.close()
    start.assert_closed_once_off_the_loop()
    assert engine._parts is None


def test_a_program_that_ends_while_it_opens_an_engine_leaves_nothing_built(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = SlowStart(monkeypatch)
    before = set(threading.enumerate())

    async def program() -> None:
        opening = asyncio.current_task()
        assert opening is not None
        interrupted = asyncio.create_task(interrupt(opening))
        try:
            async with AsyncEngine.open(small_config(checkpoint)):
                raise AssertionError("it was opened")
        finally:
            await interrupted
            # Once everything is cancelled and the loop waits for its threads alone.
            threading.Timer(0.3, start.release.set).start()

    async def interrupt(opening: asyncio.Task[None]) -> None:
        await start.until(start.building)
        opening.cancel()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(program())
    start.assert_closed_once_off_the_loop()
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("slipstream")]
    for thread in left:
        thread.join(10)
        assert not thread.is_alive(), thread.name


async def test_warming_up_writes_nothing_and_draws_for_nobody(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's engine does before it is ready, beside requests that must not notice."""
    thresholds: set[tuple[bool, bool]] = set()
    mass_threshold = truncation.mass_threshold

    def note(values: torch.Tensor, weights: torch.Tensor | None, shares: torch.Tensor) -> Any:
        thresholds.add((weights is None, weights is values))
        return mass_threshold(values, weights, shares)

    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        before = await engine.generate([5, 6, 7], LONG)
        parts = Probe(engine).parts
        busy = asyncio.create_task(engine.generate([8, 9, 10], LONG))
        with monkeypatch.context() as patched:
            # As on a GPU, where each kind of threshold is another variant of a kernel.
            patched.setattr(truncation, "kth_by_selection", truncation.kth_by_mass)
            patched.setattr(truncation, "lowest_by_pruning", truncation.lowest_by_mass)
            patched.setattr(truncation, "farthest_by_sorting", truncation.farthest_by_mass)
            patched.setattr(truncation, "mass_threshold", note)
            await asyncio.to_thread(parts.worker.code.warm_up, KERNEL_WARM_UP_TOKENS)
        assert thresholds == {(True, False), (False, True), (False, False)}
        during = await busy
        assert (await engine.generate([5, 6, 7], LONG)).token_ids == before.token_ids
        assert (await engine.generate([8, 9, 10], LONG)).token_ids == during.token_ids
        assert_idle(engine)


@pytest.mark.parametrize("fails", [False, True])
# A step of one prompt token is told from others by its row, which is new, and a step of a prompt's
# last tokens by how many they are.
@pytest.mark.parametrize(("length", "chunks"), [(3, 1), (1, 1), (24, 2)])
async def test_the_loop_is_told_of_a_result_when_the_step_behind_computes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, length: int, chunks: int, fails: bool
) -> None:
    """Whoever wakes takes the interpreter from a step that begins, and the device waits."""
    prompt = list(range(5, 5 + length))
    told: list[str] = []
    launched = threading.Semaphore(0)
    post, wake = StepResults.post, StepResults.wake
    launch, compute, meet = Worker.launch, StepComputer.compute, RowOwners.meet

    def noted_post(self: StepResults[Any], item: Any, *, wakes: bool = True) -> None:
        told.append("with" if wakes else "held")
        post(self, item, wakes=wakes)

    def noted_wake(self: StepResults[Any]) -> None:
        told.append("wake")
        wake(self)

    def counting_launch(self: Worker, *arguments: Any, **named: Any) -> Any:
        in_flight = launch(self, *arguments, **named)
        launched.release()
        return in_flight

    def patient_compute(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        told.append("compute")
        if told.count("compute") < 6:
            # Until the step behind this one is queued: it is this step's own, and that one's.
            for _ in range(2 if told.count("compute") == 1 else 1):
                assert launched.acquire(timeout=60)
        return compute(self, *arguments, **named)

    def failing_meet(self: RowOwners, *arguments: Any, **named: Any) -> Any:
        if fails and told.count("compute") == 3 and "failed" not in told:
            told.append("failed")
            raise RuntimeError("on purpose")
        return meet(self, *arguments, **named)

    monkeypatch.setattr(StepResults, "post", noted_post)
    monkeypatch.setattr(StepResults, "wake", noted_wake)
    monkeypatch.setattr(Worker, "launch", counting_launch)
    monkeypatch.setattr(StepComputer, "compute", patient_compute)
    monkeypatch.setattr(RowOwners, "meet", failing_meet)
    config = small_config(checkpoint, scheduler__max_num_batched_tokens=16)
    async with AsyncEngine.open(config) as engine:
        if fails:
            with pytest.raises(EngineDeadError, match="a step of this request failed"):
                await engine.generate(prompt, LONG)
        else:
            await engine.generate(prompt, LONG)
        # The loop is told of a first token at once, though its next step is queued.
        posts = [what for what in told if what in ("held", "with")]
        assert posts[: chunks + 1] == ["with"] * chunks + ["held"]
        # Then nobody is told before the next step computes, and then at once.
        begins = [index for index, what in enumerate(told) if what == "held"]
        sound = (2 if fails else 5) - chunks
        assert len(begins) >= sound
        for index in begins[:sound]:
            assert told[index + 1 : index + 3] == ["wake", "compute"]
        if fails:
            # A step that fails tells of the one before it as well.
            assert told[begins[sound] + 1 : begins[sound] + 4] == ["failed", "with", "wake"]
        # Behind the last step there is none.
        assert told[-2:] == ["with", "wake"]
        assert_idle(engine)
