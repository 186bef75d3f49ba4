"""An engine that is idle holds nothing of the requests that have ended, however they did."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, SamplingParams
from src.core.errors import EngineDeadError, RequestAbortedError
from src.core.structured_output import StructuredOutput
from src.engine.execution.step_computer import StepComputer
from src.engine.loop import EngineLoop
from tests.support.engines import small_config

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

# No other list of tokens begins like this one.
PROMPT = [301, 302, 303, 7, 9, 11, 13]
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}


class Watch:
    """Whoever was submitted since the last look, without keeping it alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refs: list[weakref.ref[Any]] = []
        submit = EngineLoop.submit

        def noted(loop: EngineLoop, choices: Any, **named: Any) -> None:
            for choice in choices:
                params = choice.request.params
                self.refs += map(weakref.ref, (choice, choice._stream, choice._text, params))
            submit(loop, choices, **named)

        monkeypatch.setattr(EngineLoop, "submit", noted)

    def left(self) -> list[str]:
        """What is still there of them, and lists of their prompts, in requests or elsewhere."""
        gc.collect()
        objects = [ref() for ref in self.refs if ref() is not None]
        lists = [
            each
            for each in gc.get_objects()
            if type(each) is list
            and each
            and type(each[0]) is int
            and each[:3] == PROMPT[:3]
            and each is not PROMPT
        ]
        return [f"{type(each).__name__} {each!r:.80}" for each in (*objects, *lists)]


@pytest.fixture
async def engine(checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    config = small_config(
        checkpoint,
        scheduler__max_num_seqs=2,
        cache__memory_bytes=None,
        cache__enable_prefix_caching=False,
    )
    async with AsyncEngine.open(config) as engine:
        yield engine


async def plain(engine: AsyncEngine, **asked: Any) -> None:
    await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=5, **asked))


async def several(engine: AsyncEngine) -> None:
    await plain(engine, n=3)


async def scored(engine: AsyncEngine) -> None:
    await plain(engine, prompt_logprobs=2, logprobs=2)


async def penalized(engine: AsyncEngine) -> None:
    await plain(
        engine,
        frequency_penalty=1.0,
        logit_bias={5: 1.0},
        allowed_token_ids=[5, 6, 7],
        bad_words=["fox", "the lazy dog"],
    )


async def constrained(engine: AsyncEngine) -> None:
    await plain(engine, structured_output=StructuredOutput.regex("[a-z]{3,9}"))


async def timed_out(engine: AsyncEngine) -> None:
    await engine.generate(PROMPT, SamplingParams(**LONG), timeout=0.02)


async def with_time_to_spare(engine: AsyncEngine) -> None:
    await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=5), timeout=600)


async def aborted(engine: AsyncEngine, num_tokens: int = 3, **asked: Any) -> None:
    async with engine.submit(PROMPT, SamplingParams(**LONG, **asked)) as submission:
        while submission.usage.completion_tokens < num_tokens:
            await submission.take()


async def aborted_while_scored(engine: AsyncEngine) -> None:
    await aborted(engine, prompt_logprobs=2)


async def aborted_while_constrained(engine: AsyncEngine) -> None:
    grammar = StructuredOutput.regex("[a-z]{100,200}")
    params = SamplingParams(max_tokens=150, structured_output=grammar)
    async with engine.submit(PROMPT, params) as submission:
        await submission.take()


async def aborted_in_the_queue(engine: AsyncEngine) -> None:
    others = [asyncio.create_task(engine.generate([5, 6], SamplingParams(**LONG)))]
    others += [asyncio.create_task(aborted(engine)) for _ in range(3)]
    async with asyncio.timeout(20):
        while engine.stats.num_running < 2:
            await asyncio.sleep(0)
    for task in others[1:]:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def aborted_by_name(engine: AsyncEngine) -> None:
    params = SamplingParams(**LONG)
    task = asyncio.create_task(engine.generate(PROMPT, params, request_id="mine", timeout=600))
    async with asyncio.timeout(20):
        while not engine.stats.num_running:
            await asyncio.sleep(0)
    engine.abort("mine")
    with pytest.raises(RequestAbortedError):
        await task


async def stopped(engine: AsyncEngine) -> None:
    text = (await engine.generate(PROMPT, SamplingParams(**LONG))).text
    result = await engine.generate(PROMPT, SamplingParams(**LONG, stop=(text[40:44],)))
    assert result.completions[0].stop_reason is not None


async def failed(engine: AsyncEngine) -> None:
    compute = StepComputer.compute

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("no")

    StepComputer.compute = fail  # type: ignore[method-assign]
    try:
        with pytest.raises(EngineDeadError):
            await engine.generate(PROMPT, SamplingParams(**LONG))
    finally:
        StepComputer.compute = compute  # type: ignore[method-assign]


WAYS: list[Callable[[AsyncEngine], Awaitable[None]]] = [
    plain,
    several,
    scored,
    penalized,
    constrained,
    timed_out,
    with_time_to_spare,
    aborted,
    aborted_while_scored,
    aborted_while_constrained,
    aborted_in_the_queue,
    aborted_by_name,
    stopped,
    failed,
]


async def assert_lets_go(engine: AsyncEngine, watch: Watch) -> None:
    assert watch.refs
    async with asyncio.timeout(60):
        await engine.drain(10)
    # Threads may be about to let go.
    for _ in range(20):
        if not watch.left():
            break
        await asyncio.sleep(0.3)
    assert not watch.left()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_of_a_request_that_ended_nothing_is_left(
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    way: Callable[[AsyncEngine], Awaitable[None]],
) -> None:
    watch = Watch(monkeypatch)
    await way(engine)
    await assert_lets_go(engine, watch)


@pytest.mark.parametrize("ends", ["at its length", "aborted"])
async def test_nor_of_one_that_was_preempted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    # 40 blocks of 4 tokens: three of them do not fit.
    config = small_config(checkpoint, cache__num_blocks=40, cache__enable_prefix_caching=False)
    async with AsyncEngine.open(config) as engine:
        watch = Watch(monkeypatch)
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, prompt_logprobs=1)
        tasks = [asyncio.create_task(engine.generate(PROMPT, params)) for _ in range(3)]
        async with asyncio.timeout(20):
            while not engine.stats.preemptions:
                await asyncio.sleep(0)
        if ends == "aborted":
            [task.cancel() for task in tasks]
        await asyncio.gather(*tasks, return_exceptions=True)
        del tasks, params
        await assert_lets_go(engine, watch)


async def test_nor_while_others_run(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
    other = asyncio.create_task(engine.generate([5, 6], params))
    await asyncio.sleep(0)
    watch = Watch(monkeypatch)
    async with asyncio.timeout(20):
        await aborted(engine, prompt_logprobs=1)
        steps = engine.stats.num_steps
        while engine.stats.num_steps < steps + 10:
            await asyncio.sleep(0)
    assert not other.done()
    assert not watch.left()
    await other
