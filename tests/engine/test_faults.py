"""A fault at every phase of a step: nobody hangs, nothing leaks, and others are served."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from src import AsyncEngine, GenerationResult, SamplingParams
from src.core.config import CompileSection, Config
from src.core.errors import EngineDeadError, GenerationError
from src.engine.execution.row_owners import RowOwners
from src.engine.execution.row_state import RowState
from src.engine.execution.step_computer import StepComputer
from src.engine.execution.worker import DeviceLostError, Worker
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.loop import EngineLoop
from src.engine.requests.streams import Choice, RequestStream
from src.engine.sampling import SamplingState
from src.engine.scheduling.scheduler import Scheduler
from src.engine.telemetry.observer import EngineObserver
from src.engine.telemetry.step_recorder import StepRecorder
from src.observability.metrics import EngineMetrics
from src.ops.runtime.step import CompiledStep
from tests.support.engines import assert_idle, greedy, small_config
from tests.support.probe import Probe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = [[5 + index, 6, 7] for index in range(6)]
# Their steps have parts of their own, which can fail.
CODES = {
    "uncompiled": CompileSection(enforce_eager=True),
    "compiled": CompileSection(startup="wait"),
}


class Fault:
    """Makes the ``at``-th call of a method raise, from 1; with ``again`` every later one too."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: type,
        name: str,
        *,
        at: int = 3,
        again: bool = False,
        error: type[BaseException] = RuntimeError,
    ) -> None:
        self.raised = 0
        original = getattr(owner, name)
        calls = 0

        def faulty(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at or (again and calls > at):
                self.raised += 1
                raise error(f"injected into {name}")
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, faulty)


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def config(checkpoint: Path, request: pytest.FixtureRequest) -> Config:
    # Two rows: two requests run, the others wait and are no part of an early step.
    return small_config(
        checkpoint, scheduler__pipeline_depth=request.param, scheduler__max_num_seqs=2
    )


async def all_of(engine: AsyncEngine) -> list[GenerationResult | BaseException]:
    """Every request comes to an end, whichever."""
    tasks = (engine.generate(prompt, PARAMS) for prompt in PROMPTS)
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)


def assert_nothing_is_left(engine: AsyncEngine, tasks: set[asyncio.Task[Any]]) -> None:
    assert_idle(engine)
    loop, observer = engine._loop, engine._observer
    assert loop is not None
    for left in (loop._choices, loop._unannounced, loop._timers, loop._in_flight):
        assert not left
    assert not observer._choices
    assert observer.progress.waited(1e12) == 0
    assert asyncio.all_tasks() == tasks
    loop.scheduler.check()


@pytest.fixture
def expected(reference: Any) -> list[list[int]]:
    """What the requests get when nothing fails."""
    return [greedy(reference, prompt, PARAMS.max_tokens or 0, end=None) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("code", "owner", "name"),
    [
        ("any", Worker, "launch"),
        ("any", RowOwners, "apply"),
        ("any", StepComputer, "compute"),
        ("uncompiled", StepComputer, "_forward"),
        ("uncompiled", StepComputer, "_sample"),
        ("compiled", CompiledStep, "draw"),
        ("any", Worker, "_read"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
async def test_a_fault_on_the_way_through_the_device_is_its_requests(
    config: Config,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    owner: type,
    name: str,
) -> None:
    config = msgspec.structs.replace(config, compile=CODES.get(code, config.compile))
    async with AsyncEngine.open(config) as engine:
        tasks = asyncio.all_tasks()
        fault = Fault(monkeypatch, owner, name)
        results = await all_of(engine)
        assert fault.raised == 1
        failed = [result for result in results if isinstance(result, BaseException)]
        assert 1 <= len(failed) <= 2
        for error in failed:
            assert isinstance(error, EngineDeadError)
            assert "injected" in str(error.__cause__)
        for result, tokens in zip(results, expected, strict=True):
            if isinstance(result, GenerationResult):
                assert result.token_ids == tokens
        assert engine.status.ready
        assert engine.metrics.value("slipstream_step_failures_total") == 1
        # What failed is served when it is asked for again.
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert (await engine.generate(prompt, PARAMS)).token_ids == tokens
        assert_nothing_is_left(engine, tasks)
        assert Probe(engine).row_owners.num_known <= 1


class PanicError(BaseException):
    """As libraries in Rust raise it."""


async def test_a_panic_on_the_device_thread_is_its_requests_too(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncEngine.open(config) as engine:
        tasks = asyncio.all_tasks()
        fault = Fault(monkeypatch, StepComputer, "compute", error=PanicError)
        failed = [each for each in await all_of(engine) if isinstance(each, BaseException)]
        assert fault.raised == 1
        assert 1 <= len(failed) <= 2
        assert all("PanicError" in str(error.__cause__) for error in failed)
        assert len((await engine.generate(PROMPTS[0], PARAMS)).token_ids) == PARAMS.max_tokens
        assert_nothing_is_left(engine, tasks)


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [(Worker, "launch", 13), (RowOwners, "apply", 13)],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_a_step_behind_one_that_got_no_blocks_does_not_fail_too(
    checkpoint: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    calls: int,
) -> None:
    """Wherever the fault falls, also where the failed step was to give its rows new blocks.

    Or their first owners, before whom they ask the sampler for nothing.
    """
    config = small_config(checkpoint, scheduler__pipeline_depth=2, scheduler__max_num_seqs=2)
    for at in range(1, calls + 1):
        with monkeypatch.context() as patch:
            async with AsyncEngine.open(config) as engine:
                fault = Fault(patch, owner, name, at=at)
                results = await all_of(engine)
                assert fault.raised == 1
                assert engine.metrics.value("slipstream_step_failures_total") == 1
                assert 1 <= sum(isinstance(result, EngineDeadError) for result in results) <= 2
                for result, tokens in zip(results, expected, strict=True):
                    if isinstance(result, GenerationResult):
                        assert result.token_ids == tokens


@pytest.mark.parametrize("owner", [RowState, SamplingState, RowGrammars])
async def test_a_request_that_cannot_be_installed_fails_alone(
    checkpoint: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, owner: type
) -> None:
    """The others of its step go on, and so does the step behind, which names its row still."""
    config = small_config(checkpoint, scheduler__pipeline_depth=2, scheduler__max_num_seqs=2)
    for at in range(1, 7):
        with monkeypatch.context() as patch:
            async with AsyncEngine.open(config) as engine:
                tasks = asyncio.all_tasks()
                fault = Fault(patch, owner, "install", at=at)
                results = await all_of(engine)
                assert fault.raised == 1
                failed = [each for each in results if isinstance(each, BaseException)]
                assert [type(error) for error in failed] == [GenerationError]
                for result, tokens in zip(results, expected, strict=True):
                    if isinstance(result, GenerationResult):
                        assert result.token_ids == tokens
                assert engine.metrics.value("slipstream_step_failures_total") == 0
                refused = engine.metrics.value("slipstream_row_failures_total", reason="refused")
                assert refused == 1
                assert_nothing_is_left(engine, tasks)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Choice, "take"), (RequestStream, "put")],
    ids=["text", "publish"],
)
async def test_a_fault_in_what_one_reader_gets_is_its_own(
    config: Config,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
) -> None:
    async with AsyncEngine.open(config) as engine:
        tasks = asyncio.all_tasks()
        Fault(monkeypatch, owner, name, at=4)
        results = await all_of(engine)
        failed = [result for result in results if isinstance(result, BaseException)]
        assert [type(error) for error in failed] == [EngineDeadError]
        for result, tokens in zip(results, expected, strict=True):
            if isinstance(result, GenerationResult):
                assert result.token_ids == tokens
        assert engine.status.ready
        assert_nothing_is_left(engine, tasks)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (EngineMetrics, "on_submitted"),
        (EngineMetrics, "on_admitted"),
        (EngineMetrics, "on_tokens"),
        (EngineMetrics, "on_step"),
        (EngineMetrics, "on_finished"),
        (StepRecorder, "launched"),
        (StepRecorder, "committed"),
        (StepRecorder, "published"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
async def test_a_fault_in_what_watches_is_nobodys(
    checkpoint: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    name: str,
) -> None:
    config = small_config(checkpoint, scheduler__max_num_seqs=2)
    async with AsyncEngine.open(config) as engine:
        tasks = asyncio.all_tasks()
        fault = Fault(monkeypatch, owner, name, at=1, again=True)
        results = await all_of(engine)
        assert [result.token_ids for result in results] == expected  # type: ignore[union-attr]
        assert fault.raised > 0
        assert engine.metrics.value("slipstream_observer_errors_total") >= fault.raised
        assert_nothing_is_left(engine, tasks)
    # However often it happens, the log is not filled with it.
    told = [record for record in caplog.records if "what watches the engine" in record.message]
    assert len(told) == 1
    assert told[0].exc_info is not None


def test_every_method_of_the_observer_that_the_loop_calls_contains_its_faults() -> None:
    functions = [value for value in vars(EngineLoop).values() if inspect.isfunction(value)]
    names = {name for function in functions for name in function.__code__.co_names}
    public = {name for name in vars(EngineObserver) if not name.startswith("_")}
    methods = {name for name in public & names if callable(vars(EngineObserver)[name])}
    assert {"submitted", "launched", "committed", "delivered", "ended"} <= methods
    assert not [
        name for name in methods if not hasattr(getattr(EngineObserver, name), "__wrapped__")
    ]


def planning(monkeypatch: pytest.MonkeyPatch) -> None:
    Fault(monkeypatch, Scheduler, "schedule", at=4)


def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    Fault(monkeypatch, Scheduler, "commit")


def expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    Fault(monkeypatch, Scheduler, "expire")


def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    Fault(monkeypatch, StepComputer, "compute", again=True)


def every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    Fault(monkeypatch, Worker, "launch", again=True)


def unwritable_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device after a fault in a kernel: every later call fails too."""
    Fault(monkeypatch, StepComputer, "compute", again=True)
    Fault(monkeypatch, RowState, "neutralize", at=1, again=True)


@pytest.mark.parametrize(
    ("inject", "kind"),
    [
        (planning, RuntimeError),
        (commit, RuntimeError),
        (expiry, RuntimeError),
        (every_step, RuntimeError),
        (every_launch, RuntimeError),
        (unwritable_rows, DeviceLostError),
    ],
)
async def test_a_fault_of_the_engine_itself_ends_everything_visibly(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    inject: Callable[[pytest.MonkeyPatch], None],
    kind: type[BaseException],
) -> None:
    threads = set(threading.enumerate())
    tasks = asyncio.all_tasks()
    async with AsyncEngine.open(config) as engine:
        inject(monkeypatch)
        results = await all_of(engine)
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert isinstance(await asyncio.wait_for(engine.wait_dead(), 30), kind)
        assert engine.status.phase == "failed"
        assert not engine.status.healthy
        assert engine.stall is None
        with pytest.raises(EngineDeadError):
            await engine.generate(PROMPTS[0], PARAMS)
        assert engine.metrics.value("vllm:num_requests_running") == 0
        assert engine.metrics.value("vllm:request_success_total", finished_reason="error") == 6
    assert asyncio.all_tasks() == tasks
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith("slipstream"):
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive(), thread.name
