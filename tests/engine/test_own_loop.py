"""An engine on another event loop than its own: one clear error, and nothing is disturbed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from src import SamplingParams
from src.core.errors import EventLoopError, SlipstreamError
from src.engine.client import AsyncEngine
from tests.support.engines import small_config

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


async def start(engine: AsyncEngine) -> None:
    engine.start()


async def read(engine: AsyncEngine) -> None:
    async for _ in engine.stream("Hello", PARAMS):
        pass


async def admit(engine: AsyncEngine) -> None:
    engine.admit().release()


async def abort(engine: AsyncEngine) -> None:
    engine.abort("nobody")


async def submit(engine: AsyncEngine) -> None:
    async with engine.submit("Hello", PARAMS):
        pass


async def profile(engine: AsyncEngine) -> None:
    engine.inspector.start_profile(1)


async def reset(engine: AsyncEngine) -> None:
    engine.inspector.reset_prefix_cache()


CALLS: dict[str, Callable[[AsyncEngine], Awaitable[Any]]] = {
    "start": start,
    "wait_ready": lambda engine: engine.wait_ready(),
    "wait_dead": lambda engine: engine.wait_dead(),
    "drain": lambda engine: engine.drain(0),
    "close": lambda engine: engine.close(),
    "check": lambda engine: engine.check(PARAMS),
    "tokenize": lambda engine: engine.tokenize("Hello"),
    "generate": lambda engine: engine.generate("Hello", PARAMS),
    "embed": lambda engine: engine.embed(["Hello"]),
    "classify": lambda engine: engine.classify(["Hello"]),
    "score": lambda engine: engine.score([("Hello", "you")]),
    "encode": lambda engine: engine.encode(["Hello"], task="embed"),
    "stream": read,
    "submit": submit,
    "admit": admit,
    "abort": abort,
    "adapters.load": lambda engine: engine.adapters.load("it", "/nowhere"),
    "adapters.unload": lambda engine: engine.adapters.unload("it"),
    "inspector.pool": lambda engine: engine.inspector.pool(),
    "inspector.start_profile": profile,
    "inspector.reset_prefix_cache": reset,
}
# Those that only look, and may from anywhere.
READS = {"config", "metrics", "telemetry", "status", "stall", "admits", "tokenizer", "stats"}
READS |= {"model_info", "timeline", "inspector", "adapters"}


def test_every_method_is_tried() -> None:
    names = {name for name in vars(AsyncEngine) if not name.startswith("_")} - {"open"}
    assert names - READS == {name for name in CALLS if "." not in name}


def elsewhere(call: Callable[[AsyncEngine], Awaitable[Any]], engine: AsyncEngine) -> str:
    """What the call says on an event loop of another thread."""
    said: list[BaseException] = []

    async def run() -> None:
        async with asyncio.timeout(20):
            await call(engine)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            said.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    thread.join(30)
    (error,) = said
    assert isinstance(error, EventLoopError), repr(error)
    # For a program that has caught what asyncio raised.
    assert isinstance(error, RuntimeError)
    assert isinstance(error, SlipstreamError)
    return str(error)


@pytest.fixture(scope="module")
def trials(checkpoint: Path) -> dict[str, Any]:
    """What every call says elsewhere, while a request is answered and in the end."""

    async def main() -> dict[str, Any]:
        async with AsyncEngine.open(small_config(checkpoint)) as engine:
            found: dict[str, Any] = {}
            alone = await engine.generate("Hello", PARAMS)
            async with engine.submit("Hello", PARAMS) as submission:
                for name, call in CALLS.items():
                    found[name] = await asyncio.to_thread(elsewhere, call, engine)
                take = lambda _: submission.take()  # noqa: E731
                found["Submission.take"] = await asyncio.to_thread(elsewhere, take, engine)
                result = lambda _: submission.result()  # noqa: E731
                found["Submission.result"] = await asyncio.to_thread(elsewhere, result, engine)
                found["answer"] = (await submission.result()).token_ids == alone.token_ids
            with pytest.raises(EventLoopError, match="without an event loop"):
                await asyncio.to_thread(engine.abort, "nobody")
            found["then"] = (await engine.generate("Hello", PARAMS)).token_ids == alone.token_ids
        # Closed is closed, wherever somebody closes it once more.
        await asyncio.to_thread(lambda: asyncio.run(engine.close()))
        return found

    return asyncio.run(main())


@pytest.mark.parametrize("name", [*CALLS, "Submission.take", "Submission.result"])
def test_a_call_elsewhere_says_what_is_wrong(trials: dict[str, Any], name: str) -> None:
    assert "was used on another event loop" in trials[name]
    assert "close it within one asyncio.run()" in trials[name]


def test_nobody_on_its_own_loop_notices(trials: dict[str, Any]) -> None:
    assert trials["answer"]
    assert trials["then"]


def test_a_second_run_is_told_that_the_first_has_ended(checkpoint: Path) -> None:
    """The usual way there: two calls of `asyncio.run`, one that opens and one that closes."""
    engine = AsyncEngine(small_config(checkpoint))

    async def first() -> None:
        engine.start()
        await engine.wait_ready()

    asyncio.run(first())
    for call in (engine.close, lambda: engine.generate("Hello", PARAMS), engine.wait_ready):
        with pytest.raises(EventLoopError, match="which has ended since"):
            asyncio.run(call())


def test_to_ask_before_the_start_chooses_no_loop(checkpoint: Path) -> None:
    engine = AsyncEngine(small_config(checkpoint))
    assert not engine.abort("nobody")

    async def ask() -> None:
        with pytest.raises(SlipstreamError, match=r"loading|starting|created"):
            engine.admit()

    asyncio.run(ask())

    async def use() -> None:
        engine.start()
        await engine.wait_ready()
        await engine.close()

    asyncio.run(use())
