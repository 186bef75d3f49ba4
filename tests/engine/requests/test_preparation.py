"""What ends a request on its way into the queue: a full queue, its deadline, an abort."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, FinishReason, SamplingParams
from src.core.errors import (
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestAbortedError,
    ShuttingDownError,
)
from src.core.outputs import GenerationResult
from src.core.structured_output import StructuredOutput
from src.engine.execution.step_computer import StepComputer
from src.engine.grammar.compiler import GrammarCompiler
from src.engine.requests.prompts import RequestBuilder
from tests.support.engines import assert_idle, small_config

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
FORMED = SamplingParams(n=2, max_tokens=20, structured_output=StructuredOutput.regex("[a-z]{3}"))
# What takes long, and with which parameters it comes to that.
STAGES: dict[str, tuple[type, str, SamplingParams]] = {
    "tokenizing": (RequestBuilder, "tokenize", SamplingParams(n=2, max_tokens=20)),
    "compiling": (GrammarCompiler, "compile", FORMED),
}


@pytest.fixture
async def engine(checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    config = small_config(checkpoint, scheduler__max_num_seqs=1, scheduler__max_waiting_requests=2)
    async with AsyncEngine.open(config) as engine:
        yield engine
        await engine.drain(10)
        assert_idle(engine)
        assert not engine._admissions.unfinished


class Stage:
    """A stage that nobody passes until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.entered = asyncio.Event()
        self.released = asyncio.Event()
        owner, method, self.params = STAGES[name]
        real: Callable[..., Any] = getattr(owner, method)

        async def slow(*arguments: Any) -> Any:
            self.entered.set()
            await self.released.wait()
            return await real(*arguments)

        monkeypatch.setattr(owner, method, slow)


@contextlib.asynccontextmanager
async def full(engine: AsyncEngine) -> AsyncIterator[None]:
    """One runs and two wait: nobody else may, and none of them ends meanwhile."""
    goes_on, compute = threading.Event(), StepComputer.compute

    def held(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        goes_on.wait(60)
        return compute(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepComputer, "compute", held)
        tasks = [asyncio.create_task(engine.generate([5, 6, 7], LONG))]
        while not engine.stats.num_running:
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(engine.generate([5, 6, 7], LONG)) for _ in range(2)]
        while engine.admits:
            await asyncio.sleep(0)
        try:
            yield
        finally:
            goes_on.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def refusals(engine: AsyncEngine, reason: str = "queue_full") -> float:
    return engine.metrics.value("slipstream_queue_rejections_total", reason=reason)


def assert_empty(result: GenerationResult, reason: FinishReason) -> None:
    assert [each.finish_reason for each in result.completions] == [reason] * 2
    assert all(not each.text and not each.token_ids for each in result.completions)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_deadline_passes_meanwhile(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    slow = Stage(monkeypatch, stage)
    started = time.monotonic()
    assert_empty(await engine.generate("fox", slow.params, timeout=0.05), FinishReason.DEADLINE)
    assert 0.05 <= time.monotonic() - started < 10
    assert slow.entered.is_set()
    # The same as for one that waits in the queue, and counted as that.
    ended = {"finished_reason": "deadline"}
    assert engine.metrics.value("vllm:request_success_total", **ended) == 2
    assert refusals(engine) == 0
    slow.released.set()
    result = await engine.generate("fox", slow.params, timeout=60)
    assert result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("stage", STAGES)
async def test_an_abort_by_name_ends_it(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    slow = Stage(monkeypatch, stage)
    task = asyncio.create_task(engine.generate("fox", slow.params, request_id="mine"))
    await slow.entered.wait()
    assert not engine.abort("other")
    assert engine.abort("mine")
    assert engine.abort("mine")
    with pytest.raises(RequestAbortedError, match="mine"):
        await task
    assert not engine.abort("mine")
    # A stream sees the end as a delta.
    slow.entered.clear()
    stream = engine.stream("fox", slow.params, request_id="mine", timeout=60)
    first = asyncio.ensure_future(anext(stream))
    await slow.entered.wait()
    assert engine.abort("mine")
    assert (await first).finish_reason is FinishReason.ABORT
    await stream.aclose()


async def test_an_abort_at_the_very_end_counts(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RequestBuilder.requests

    async def aborted(self: RequestBuilder, *arguments: Any, **options: Any) -> Any:
        requests = await real(self, *arguments, **options)
        assert engine.abort("mine")
        return requests

    monkeypatch.setattr(RequestBuilder, "requests", aborted)
    with pytest.raises(RequestAbortedError, match="mine"):
        await engine.generate("fox", LONG, request_id="mine")


@pytest.mark.parametrize("stage", STAGES)
async def test_who_goes_away_meanwhile_leaves_nothing(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    slow = Stage(monkeypatch, stage)
    task = asyncio.create_task(engine.generate("fox", slow.params, timeout=60))
    await slow.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("stage", STAGES)
async def test_draining_finishes_what_was_let_in(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    slow = Stage(monkeypatch, stage)
    task = asyncio.create_task(engine.generate("fox", slow.params))
    await slow.entered.wait()
    drain = asyncio.create_task(engine.drain(60))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDownError):
        await engine.generate("fox", slow.params)
    slow.released.set()
    await drain
    # It has been served by then, and its reader only has to look.
    assert not len(engine._admissions)
    result = await task
    assert {c.finish_reason for c in result.completions} <= {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("stage", STAGES)
async def test_draining_waits_for_nobody_for_ever(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    slow = Stage(monkeypatch, stage)
    task = asyncio.create_task(engine.generate("fox", slow.params))
    await slow.entered.wait()
    async with asyncio.timeout(60):
        await engine.drain(0.01)
        # Nothing of it was sent: it may be asked for elsewhere.
        with pytest.raises(ShuttingDownError) as caught:
            await task
    assert caught.value.retry_after


async def test_who_was_let_in_and_comes_later_is_served(engine: AsyncEngine) -> None:
    admission = engine.admit()
    gone = engine.admit()
    drain = asyncio.create_task(engine.drain(60))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDownError):
        engine.admit()
    token_ids = await engine.tokenize("fox")
    gone.release()
    gone.release()
    async with engine.submit(token_ids, LONG, admission=admission) as submission:
        admission.release()
        await drain
        assert submission.usage.completion_tokens == LONG.max_tokens


async def test_who_was_let_in_and_never_comes_is_refused_in_the_end(engine: AsyncEngine) -> None:
    with engine.admit() as admission:
        await engine.drain(0.01)
        with pytest.raises(ShuttingDownError):
            async with engine.submit([5, 6], LONG, admission=admission):
                pass


async def test_a_full_queue_refuses_before_anything_is_done(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with full(engine):
        Stage(monkeypatch, "tokenizing")
        async with asyncio.timeout(60):
            with pytest.raises(QueueFullError) as caught:
                await engine.generate("fox", FORMED)
        assert caught.value.retry_after >= 1
        assert refusals(engine) == 1
        # What can never be served is no affair of the queue's.
        with pytest.raises(InvalidRequestError, match="top_p"):
            await engine.generate("fox", SamplingParams(top_p=-0.1))
        monkeypatch.undo()
        for prompt in ([5] * 100_000, [5] * 400):
            with pytest.raises(PromptTooLongError):
                await engine.generate(prompt, LONG)
        assert refusals(engine) == 1


async def test_a_queue_that_has_filled_up_refuses_before_a_grammar_is_compiled(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, real = Stage(monkeypatch, "compiling"), RequestBuilder.tokenize
    async with contextlib.AsyncExitStack() as stack:

        async def filling(self: RequestBuilder, prompt: Any, *how: Any) -> Any:
            if prompt == "fox":
                await stack.enter_async_context(full(engine))
            return await real(self, prompt, *how)

        monkeypatch.setattr(RequestBuilder, "tokenize", filling)
        async with asyncio.timeout(60):
            with pytest.raises(QueueFullError):
                await engine.generate("fox", FORMED)
        assert not never.entered.is_set()
        assert refusals(engine) == 1


async def test_completions_that_share_a_prediction_are_let_in_with_it(checkpoint: Path) -> None:
    """Its tokens are there once, so they count once."""
    changes = {"speculation__method": "suffix", "scheduler__max_waiting_tokens": 60}
    params = SamplingParams(n=4, temperature=0, max_tokens=3, ignore_eos=True)
    async with AsyncEngine.open(small_config(checkpoint, **changes)) as engine:
        # Four times 3 tokens and 30, where each of them with its own would be 132.
        result = await engine.generate([5, 6, 7], params, prediction=list(range(5, 35)))
        assert len(result.completions) == 4
        with pytest.raises(InvalidRequestError, match="n is 4: 62 tokens together"):
            await engine.generate([5, 6, 7], params, prediction=list(range(5, 55)))
        await asyncio.wait_for(engine._loop.wait_idle(), 60)
        assert_idle(engine)
