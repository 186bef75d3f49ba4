"""Whose text is tokenized next: owners take turns, and short texts do not wait for long ones."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from src.core.config import LimitsSection, StructuredOutputSection
from src.core.errors import ShuttingDownError
from src.core.sampling_params import SamplingParams
from src.core.settings import CHECKOUT
from src.core.status import ModelInfo
from src.core.thinking import Thinking
from src.engine.grammar.compiler import GrammarCompiler
from src.engine.requests import text_work
from src.engine.requests.prompts import ChatOptions, RequestBuilder
from src.http.server.body_work import beside_the_loop, in_turn
from src.text import Tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SHORT, LONG = "word " * 1000, "word " * 20_000


class _Watched:
    """A tokenizer that notes what it encodes, and waits where it is told to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.go_on = threading.Event()
        self.begun: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.begun.append(text[:5])
        if text.startswith("wait"):
            assert self.go_on.wait(30)
        return self._tokenizer.encode(text, add_special_tokens)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> _Watched:
    monkeypatch.setattr(text_work, "usable_cpus", lambda: 1)
    return _Watched(Tokenizer.from_directory(CHECKOUT / "configs" / "demo"))


@pytest.fixture
def builder(watched: _Watched) -> Iterator[RequestBuilder]:
    tokenizer: Any = watched
    info = ModelInfo(
        name="m", served_names=("m",), max_model_len=100_000, vocab_size=watched.vocab_size,
        dtype="float32", implementation="native", device_type="cpu", created=0,
        default_sampling={},
    )  # fmt: skip
    grammars = GrammarCompiler(tokenizer, info.vocab_size, [1], StructuredOutputSection())
    builder = RequestBuilder(tokenizer, info, [1], grammars, LimitsSection())
    yield builder
    watched.go_on.set()
    builder.close()
    grammars.close()


@pytest.mark.parametrize("text", [SHORT, LONG])
async def test_owners_take_turns(builder: RequestBuilder, watched: _Watched, text: str) -> None:
    held = asyncio.create_task(builder.tokenize("wait" + text, tenant="loud"))
    while not watched.begun:
        await asyncio.sleep(0.001)
    loud = [
        asyncio.create_task(builder.tokenize(f"loud{number}{text}", tenant="loud"))
        for number in range(5)
    ]
    await asyncio.sleep(0)
    quiet = [
        asyncio.create_task(builder.tokenize(f"mine{text}", ChatOptions(tenant="quiet"), "loud")),
        asyncio.create_task(builder.tokenize(f"more{text}", tenant="other")),
    ]
    await asyncio.sleep(0)
    watched.go_on.set()
    await asyncio.gather(held, *loud, *quiet)
    assert watched.begun[1:4] == ["loud0", "minew", "morew"]


async def test_a_short_text_does_not_wait_for_a_long_one(
    builder: RequestBuilder, watched: _Watched
) -> None:
    held = asyncio.create_task(builder.tokenize("wait" + LONG, tenant="a"))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await builder.tokenize(SHORT, tenant="a")
    assert not held.done()
    watched.go_on.set()
    await held


async def test_what_else_is_looked_up_has_its_owners_turn(
    builder: RequestBuilder, watched: _Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    run = text_work.TextWork.run

    async def noting(self: Any, owner: str, *args: Any, **more: Any) -> Any:
        seen.append(owner)
        return await run(self, owner, *args, **more)

    monkeypatch.setattr(text_work.TextWork, "run", noting)
    params = SamplingParams(
        bad_words=["word"], thinking=Thinking(openings=("<a>",), closings=("</a>",), budget=5)
    )
    await builder.requests(
        [1], params, arrival=0.0, priority=0, timeout=None, cache_salt="", tenant="quiet"
    )
    assert seen == ["quiet", "quiet"]


class _Text(str):
    """A text that can be referred to weakly."""

    __slots__ = ("__weakref__",)


def _refuse(text: str) -> None:
    raise RuntimeError("refused")


def test_the_loop_takes_some_text_at_once_and_more_as_time_goes_by() -> None:
    now = 0.0
    budget = text_work.InlineBudget(lambda: now)
    assert not budget.take(513)
    assert [budget.take(512) for _ in range(9)] == [True] * 8 + [False]
    assert not budget.take(1)
    now = 0.001
    assert budget.take(100)
    assert not budget.take(1)
    # However long nobody asks, no more than at first is taken at once.
    now = 100.0
    assert [budget.take(512) for _ in range(9)] == [True] * 8 + [False]


@pytest.mark.parametrize("where", ["engine", "bodies", "others"])
async def test_a_refused_text_goes_with_its_error(where: str) -> None:
    work = text_work.TextWork()
    ways: dict[str, Callable[[_Text], Awaitable[None]]] = {
        "engine": lambda text: work.run("a", 5, _refuse, text),
        "bodies": lambda text: beside_the_loop(5, _refuse, text),
        "others": lambda text: in_turn(_refuse, text),
    }

    async def refused(text: _Text) -> weakref.ref[_Text]:
        with pytest.raises(RuntimeError, match="refused"):
            await ways[where](text)
        return weakref.ref(text)

    gc.collect()
    gc.disable()
    try:
        text = await refused(_Text("some"))
        async with asyncio.timeout(20):
            while text() is not None:  # The thread may not have left it yet.
                await asyncio.sleep(0.001)
    finally:
        gc.enable()
        work.close()


async def test_a_thread_that_cannot_be_started_is_no_closed_engine(
    builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await builder.tokenize(SHORT)


async def test_whoever_waits_or_comes_as_it_closes_learns_that_it_closes(
    builder: RequestBuilder, watched: _Watched
) -> None:
    held = asyncio.create_task(builder.tokenize("wait" + SHORT))
    while not watched.begun:
        await asyncio.sleep(0.001)
    waiting, left = (asyncio.create_task(builder.tokenize(SHORT)) for _ in range(2))
    await asyncio.sleep(0)
    left.cancel()
    closing = asyncio.create_task(asyncio.to_thread(builder.close))
    with pytest.raises(ShuttingDownError):
        await waiting
    # Whoever has gone himself is told nothing.
    with pytest.raises(asyncio.CancelledError):
        await left
    watched.go_on.set()
    assert await held
    await closing
    with pytest.raises(ShuttingDownError):
        await builder.tokenize(SHORT)
