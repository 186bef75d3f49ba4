"""How many texts of calls are read on the event loop's own thread: few, however short they are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from src.core.errors import InvalidRequestError, RequestAbortedError
from src.engine.client import AsyncEngine
from src.engine.requests import task_runs, text_work
from src.engine.requests.embedding_run import EmbeddingRun
from src.engine.requests.task_runs import CosineRun, PairRun
from tests.support.classifiers import make_classifier
from tests.support.encoders import make_encoder, save_encoder_tokenizer, save_modules
from tests.support.engines import assert_idle, small_config

pytestmark = pytest.mark.anyio

# A text counts as 32 characters at least, and the loop reads so many of 4,096 before time goes by.
MOST = 4096 // 32
MANY = 3 * 64
MANY_PAIRS = 2400


class Threads:
    """How often something was called on the event loop's thread, and on others."""

    def __init__(self) -> None:
        self.here = 0
        self.beside = 0

    def note(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.here += 1
        else:
            self.beside += 1

    def watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            self.note()
            return function(*arguments, **named)

        monkeypatch.setattr(owner, name, noted)


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forgotten as time goes by, so that it does not matter how long a test takes."""
    monkeypatch.setattr(text_work, "_CHARS_PER_SECOND", 0.0)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_encoder(tmp_path_factory.mktemp("reading") / "bert", "bert")
    save_encoder_tokenizer(directory)
    prompts = {"long": "a quick brown fox " * 5}
    save_modules(directory, pooling={"pooling_mode": "mean"}, prompts=prompts)
    return directory


@pytest.fixture
async def embedder(encoder: Path) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.open(small_config(encoder)) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("reading") / "ranker", "bert", labels=1)


@pytest.fixture
async def ranker(cross_encoder: Path) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.open(small_config(cross_encoder)) as engine:
        yield engine
        assert_idle(engine)


@pytest.mark.usefixtures("timeless")
@pytest.mark.parametrize("text", ["a", [5]], ids=["texts", "token ids"])
async def test_many_tiny_texts_are_read_beside_the_loop(
    embedder: AsyncEngine, monkeypatch: pytest.MonkeyPatch, text: str | list[int]
) -> None:
    read = Threads()
    read.watch(monkeypatch, EmbeddingRun, "_tokens")
    assert len(await embedder.embed([text] * MANY)) == MANY
    assert (read.here, read.beside) == (0, MANY)


@pytest.mark.usefixtures("timeless")
async def test_long_lists_of_token_ids_are_read_beside_the_loop(
    embedder: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Threads()
    read.watch(monkeypatch, EmbeddingRun, "_tokens")
    # As long as tokenizing 4 times 32 characters, and 16 times.
    await embedder.embed([[5] * 128] * 4)
    assert (read.here, read.beside) == (4, 0)
    await embedder.embed([[5] * 129] * 17)
    assert (read.here, read.beside) == (4, 17)


@pytest.mark.usefixtures("timeless")
async def test_many_calls_for_tiny_texts_are_read_beside_the_loop(
    embedder: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Threads()
    read.watch(monkeypatch, EmbeddingRun, "_tokens")
    for _ in range(MOST + 20):
        await embedder.embed(["a"])
    assert (read.here, read.beside) == (MOST, 20)


@pytest.mark.usefixtures("timeless")
async def test_a_long_prompt_counts_with_each_text(
    embedder: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Threads()
    read.watch(monkeypatch, EmbeddingRun, "_tokens")
    await embedder.embed(["a"] * 8)
    assert (read.here, read.beside) == (8, 0)
    await embedder.embed(["a"] * 8, prompt_name="long")
    assert (read.here, read.beside) == (8, 8)


@pytest.mark.usefixtures("timeless")
@pytest.mark.parametrize(
    "pairs",
    [
        [("a", "b")] * MANY,
        # A query of some tokens is copied for each document: fifteen are too much for the loop.
        [("fox " * 60, "b")] * (64 + 15),
    ],
    ids=["tiny", "long query"],
)
async def test_many_tiny_pairs_are_read_beside_the_loop(
    ranker: AsyncEngine, monkeypatch: pytest.MonkeyPatch, pairs: Sequence[tuple[str, str]]
) -> None:
    read = Threads()
    read.watch(monkeypatch, PairRun, "_tokens")
    assert len(await ranker.score(pairs, truncate=-1)) == len(pairs)
    assert (read.here, read.beside) == (0, len(pairs))


@pytest.mark.usefixtures("timeless")
@pytest.mark.parametrize("kind", ["texts", "token ids"])
async def test_texts_of_many_pairs_are_compared_beside_the_loop(
    embedder: AsyncEngine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    query: Any = "q"
    documents: list[Any] = [str(number % 40) for number in range(MANY_PAIRS)]
    if kind == "token ids":
        query = [5] * 120
        documents = [[5 + number % 40] * 120 for number in range(MANY_PAIRS)]
    read, compared = Threads(), Threads()
    read.watch(monkeypatch, CosineRun, "_tokens")
    compared.watch(monkeypatch, task_runs, "_key")
    scores = await embedder.score([(query, document) for document in documents])
    assert [each.score for each in scores[:40]] * 60 == [each.score for each in scores]
    assert len({round(each.score, 6) for each in scores}) >= 30
    # The query is compared once, and each different text is read once.
    assert compared.here + compared.beside == MANY_PAIRS + 1
    assert read.here + read.beside <= 41
    # A pair counts as six characters, and four token ids as one.
    size = 6 if kind == "texts" else 6 + 120 // 4
    assert compared.here <= 1 + 4096 // size


async def test_what_is_compared_is_the_token_ids_and_their_types(
    embedder: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Threads()
    read.watch(monkeypatch, CosineRun, "_tokens")
    # A text that spells a list is none, and a tuple is the same as a list.
    scores = await embedder.score([([5], (5,)), ((5,), [5]), ("[5]", [5]), ("[5]", "5")])
    assert read.here + read.beside == 3
    assert [round(each.score, 5) == 1.0 for each in scores] == [True, True, False, False]
    for strange, message in (
        ([True], "must be"),
        ([1.0], "must be"),
        ([2**40], "token ids must be from 0 to"),
        ([], "must not be empty"),
        ([[1]], "must be"),
        (None, "must be text or a list of token ids"),
        ({1: 2}, "must be text or a list of token ids"),
    ):
        for pair in ((strange, [1]), ([1], strange), (strange, strange)):
            with pytest.raises(InvalidRequestError, match=rf"pairs\[2\]: .*{message}") as refused:
                await embedder.score([([1], [1]), ([1], (1,)), pair, ([1], [1])])
            assert refused.value.param in ("query", "document"), strange
    with pytest.raises(InvalidRequestError, match=r"pairs\[70\]: each pair must be two texts"):
        await embedder.score([("a", "b")] * 70 + ["ab"] + [("a", "b")] * 70)


async def test_a_call_ends_while_its_pairs_are_compared(
    embedder: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, loop, count = task_runs._key, asyncio.get_running_loop(), 0

    def aborting(text: Any) -> Any:
        nonlocal count
        count += 1
        loop.call_soon_threadsafe(embedder.abort, "mine")
        return key(text)

    monkeypatch.setattr(task_runs, "_key", aborting)
    pairs = [([5] * 120, [number + 5] * 120) for number in range(MANY)]
    with pytest.raises(RequestAbortedError):
        await embedder.score(pairs, request_id="mine")
    assert 0 < count < MANY
