"""Calls for many vectors: their share of the queue, and their end while the engine drains."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from src.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
    RequestAbortedError,
    ShuttingDownError,
)
from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine
from src.engine.execution.step_computer import StepComputer
from src.engine.requests import embedding_run, text_work
from src.engine.requests.embedding_run import EmbeddingRun
from src.engine.requests.submission import Submission
from src.engine.scheduling.replay import read_lines, replay
from src.engine.scheduling.waiting import WaitingQueue
from src.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.classifiers import make_classifier
from tests.support.engines import assert_idle, random_prompts, small_config

pytestmark = pytest.mark.anyio

TEXTS = [[5 + index % 300] * 8 for index in range(200)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("calls") / "tiny", "qwen3", tokenizer=True)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = StepComputer.compute

    def slow(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        time.sleep(0.005)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", slow)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Steps wait while it is not set, so that nothing ends while a test looks at what waits."""
    opened = threading.Event()
    opened.set()
    compute = StepComputer.compute

    def held(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        opened.wait(60)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", held)
    yield opened
    opened.set()


async def begun(engine: AsyncEngine) -> None:
    while not engine.stats.num_running:
        await asyncio.sleep(0)


def runs_of(engine: AsyncEngine) -> list[EmbeddingRun]:
    """Calls that have not ended."""
    named = engine._admissions.unfinished.values()
    return [each for same in named for each in same if isinstance(each, EmbeddingRun)]


async def queued(engine: AsyncEngine, count: int) -> None:
    """Wait until so many requests and calls are there, and of each something waits or runs."""

    def is_queued(each: object) -> bool:
        return bool(each._open) if isinstance(each, EmbeddingRun) else isinstance(each, Submission)

    async with asyncio.timeout(50):
        while True:
            unfinished = [each for same in engine._admissions.unfinished.values() for each in same]
            if len(unfinished) == count and all(map(is_queued, unfinished)):
                break
            await asyncio.sleep(0.001)
    # One is running, so what waits is what no row is free for.
    await begun(engine)


async def test_a_call_that_cannot_be_let_in_is_not_read(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: WaitingQueue, num_tokens: int, lane: str) -> None:
        raise QueueFullError("it is full", code="queue_full")

    num_read, tokens = 0, EmbeddingRun._tokens

    def noted(self: EmbeddingRun, *arguments: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return tokens(self, *arguments)

    monkeypatch.setattr(WaitingQueue, "check_further_tokens", full)
    monkeypatch.setattr(EmbeddingRun, "_tokens", noted)
    async with AsyncEngine.open(small_config(decoder)) as engine:
        with pytest.raises(QueueFullError, match="it is full"):
            await engine.embed(TEXTS[:2])
        assert num_read == 0
        # One text is no call of many.
        assert len(await engine.embed(TEXTS[:1])) == 1
        assert num_read == 1


async def test_texts_that_are_not_queued_yet_count_as_waiting(
    decoder: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, num_read = EmbeddingRun._read, 0

    async def noted(self: EmbeddingRun, *arguments: Any) -> None:
        nonlocal num_read
        await read(self, *arguments)
        num_read += 1

    monkeypatch.setattr(EmbeddingRun, "_read", noted)
    config = small_config(decoder, scheduler__max_waiting_tokens=1700)
    half = TEXTS[:106]  # up to half of all tokens that may wait
    async with AsyncEngine.open(config) as engine:
        with pytest.raises(InvalidRequestError, match="more than 850 tokens together") as raised:
            await engine.embed(TEXTS[:107])
        assert raised.value.param == "input"
        for ends in (True, False):
            gate.clear()
            num_read = 0
            # All calls together may have three quarters.
            calls = [asyncio.create_task(engine.embed(texts)) for texts in (half, half[:53])]
            # A thread reads the texts of one while the other one begins.
            while num_read < len(calls):
                await asyncio.sleep(0.001)
            await queued(engine, 2)
            # Most are not queued: only few of one call are at a time.
            assert engine.stats.num_waiting < 150
            with pytest.raises(
                QueueFullError, match="tokens are waiting that are of texts"
            ) as full:
                await engine.embed([[5] * 40] * 2)
            assert full.value.retry_after >= 1
            # The last quarter, and what runs already, is for those who ask for one thing.
            params = SamplingParams(max_tokens=2)
            alone: list[asyncio.Task[Any]] = [
                asyncio.create_task(engine.embed([[5] * 200])),
                asyncio.create_task(engine.generate([6] * 200, params)),
            ]
            await queued(engine, 4)
            with pytest.raises(QueueFullError, match="tokens are waiting, with 250 more"):
                await engine.embed([[5] * 250])
            with pytest.raises(QueueFullError, match="tokens are waiting"):
                await engine.generate([5] * 250)
            gate.set()
            assert (await alone[0])[0].prompt_tokens == 200
            assert len((await alone[1]).completions[0].token_ids) == 2
            if ends:
                assert [len(made) for made in await asyncio.gather(*calls)] == [106, 53]
            else:
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
            assert len(await engine.embed([[5] * 250])) == 1
        assert_idle(engine)


@pytest.mark.usefixtures("slow_steps")
async def test_who_asks_for_one_thing_is_never_refused_for_texts_of_many_calls(
    decoder: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many calls there are; and the calls go on in equal parts."""
    submission = EmbeddingRun._submission
    # For each text that is to be queued: how many of its call are, and how many calls have more.
    tries: list[tuple[int, int]] = []

    def noted(self: EmbeddingRun, ids: list[int]) -> Submission:
        tries.append((len(self._open), sum(bool(run._left) for run in runs_of(engine))))
        return submission(self, ids)

    monkeypatch.setattr(EmbeddingRun, "_submission", noted)
    config = small_config(decoder, scheduler__max_waiting_requests=64, scheduler__max_num_seqs=8)
    num_calls = 12
    async with AsyncEngine.open(config) as engine:
        gate.clear()
        calls = []
        for count in range(1, num_calls + 1):
            # One after the other, so that the first ones find the queue empty.
            calls.append(asyncio.create_task(engine.embed(TEXTS[:40])))
            await queued(engine, count)
        # Three of four places, and one for each call.
        assert 40 <= engine.stats.num_waiting <= 48 + num_calls
        alone: list[asyncio.Task[Any]] = [
            asyncio.create_task(engine.generate([6] * 4, SamplingParams(max_tokens=2))),
            asyncio.create_task(engine.embed(["the quick brown fox"])),
        ]
        await queued(engine, num_calls + 2)
        assert not any(each.done() for each in (*calls, *alone))
        gate.set()
        done, _ = await asyncio.wait([*alone, *calls], return_when=asyncio.FIRST_COMPLETED)
        assert done <= set(alone), "it waited for whole calls"
        await asyncio.gather(*alone)
        assert [len(made) for made in await asyncio.gather(*calls)] == [40] * num_calls
        assert_idle(engine)
    # Those that came first took all there was, and then had no more than the others.
    assert all(others < max(1, 56 // num_open) for others, num_open in tries), tries
    assert len(tries) >= 40 * num_calls


@pytest.mark.usefixtures("slow_steps")
async def test_texts_of_one_tenant_leave_room_for_those_of_others(
    decoder: Path, gate: threading.Event
) -> None:
    config = small_config(decoder, scheduler__max_waiting_tokens=3400)
    async with AsyncEngine.open(config) as engine:
        with pytest.raises(InvalidRequestError, match=r"more than 1274 tokens .* for one request"):
            await engine.embed(TEXTS, tenant="one")
        gate.clear()
        many = asyncio.create_task(engine.embed(TEXTS[:159], tenant="one"))
        await queued(engine, 1)
        single = asyncio.create_task(engine.embed([[5] * 250], tenant="one"))
        await queued(engine, 2)
        with pytest.raises(QueueFullError, match="of this key are waiting"):
            await engine.embed([[5] * 250], tenant="one")
        gate.set()
        (other,) = await engine.embed([[5] * 250], tenant="other")
        assert other.prompt_tokens == 250
        assert not many.done()
        assert len(await many) == 159
        assert len(await single) == 1
        assert_idle(engine)


async def test_a_call_that_has_begun_waits_for_room_in_a_full_queue(
    decoder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "plans.jsonl"
    config = small_config(
        decoder,
        scheduler__max_waiting_requests=2,
        scheduler__max_num_seqs=2,
        observability__plan_log=str(log),
    )
    async with AsyncEngine.open(config) as engine:
        many = asyncio.create_task(engine.embed(TEXTS[:60]))
        await begun(engine)
        refused = 0

        async def press(texts: list[list[int]]) -> None:
            nonlocal refused
            while not many.done():
                try:
                    await engine.embed(texts)
                except QueueFullError:
                    refused += 1
                assert engine.stats.num_waiting <= 2 + 2
                # A loop that never sleeps leaves the interpreter to no other thread.
                await asyncio.sleep(0.001)

        await asyncio.gather(*(press([prompt]) for prompt in random_prompts(6, longest=20)))
        made = await many
        assert_idle(engine)
        (alone,) = await engine.embed([TEXTS[50]])
    assert refused
    assert len(made) == 60
    assert made[50].vector == pytest.approx(alone.vector, abs=1e-5)
    with log.open() as lines:
        assert replay(read_lines(lines)).difference is None


@pytest.mark.usefixtures("slow_steps")
async def test_a_call_that_has_begun_is_finished_while_the_engine_drains(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector = EmbeddingRun._vector

    async def later(self: EmbeddingRun, index: int) -> Any:
        made = await vector(self, index)
        await asyncio.sleep(0.005)
        return made

    # One text of a call is under way at a time, so that nothing runs between two of them. The queue
    # has room for more: only that the call has not queued all of them keeps the engine.
    monkeypatch.setattr(EmbeddingRun, "_vector", later)
    monkeypatch.setattr(embedding_run, "_WINDOW", 1)
    async with AsyncEngine.open(small_config(decoder)) as engine:
        many = asyncio.create_task(engine.embed(TEXTS[:40]))
        await begun(engine)
        await engine.drain(60)
        await engine.close()
        assert len(await many) == 40
        with pytest.raises(ShuttingDownError):
            await engine.embed(TEXTS[:1])


@pytest.mark.usefixtures("slow_steps")
async def test_a_call_that_takes_longer_than_draining_may_is_aborted(decoder: Path) -> None:
    async with AsyncEngine.open(small_config(decoder, scheduler__max_waiting_requests=1)) as engine:
        many = asyncio.create_task(engine.embed(TEXTS))
        await begun(engine)
        await engine.drain(0.05)
        with pytest.raises(RequestAbortedError):
            await many
        assert_idle(engine)


async def test_an_abort_ends_a_call_whose_texts_are_not_queued_yet(decoder: Path) -> None:
    async with AsyncEngine.open(small_config(decoder)) as engine:
        many = asyncio.create_task(engine.embed(["the quick brown fox"] * 300, request_id="mine"))
        await asyncio.sleep(0)
        assert engine.stats.num_waiting == 0
        assert engine.abort("mine")
        with pytest.raises(RequestAbortedError):
            await many
        assert_idle(engine)


@pytest.fixture
def held_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Texts are tokenized in threads, which do not end until it is set."""
    monkeypatch.setattr("src.engine.requests.text_work.INLINE_CHARS", 0)
    goes_on = threading.Event()
    encode = Tokenizer.encode

    def held_up(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        if text:
            goes_on.wait(20)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", held_up)
    yield goes_on
    goes_on.set()


@pytest.mark.parametrize("kind", ["texts", "pairs"])
async def test_many_short_texts_are_tokenized_beside_the_loop(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    directory = decoder if kind == "texts" else make_classifier(tmp_path, "bert", labels=1)
    # Nothing is forgotten as time goes by, so that it does not matter how long this takes.
    monkeypatch.setattr(text_work, "_CHARS_PER_SECOND", 0.0)
    encode, run = Tokenizer.encode, text_work.TextWork.run
    here, beside, jobs = 0, 0, 0

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        nonlocal here, beside
        if threading.current_thread() is threading.main_thread():
            here += len(text)
        else:
            beside += len(text)
        return encode(self, text, add_special_tokens)

    async def counting(self: Any, *arguments: Any) -> Any:
        nonlocal jobs
        jobs += 1
        return await run(self, *arguments)

    texts = [f"number {number} of " + "many words " * 5 for number in range(600)]
    chars = sum(map(len, texts))
    async with AsyncEngine.open(small_config(directory)) as engine:
        monkeypatch.setattr(Tokenizer, "encode", counted)
        monkeypatch.setattr(text_work.TextWork, "run", counting)
        if kind == "texts":
            await engine.embed(texts[:1])
            assert (here, jobs) == (len(texts[0]), 0)
            made = [each.prompt_tokens for each in await engine.embed(texts)]
            want = [len(encode(engine.tokenizer, text)) for text in texts]
        else:
            scores = await engine.score([("number", text) for text in texts])
            made = [each.prompt_tokens for each in scores]
            want = [len(engine.tokenizer.encode_pair("number", text).ids) for text in texts]
        assert_idle(engine)
    assert made == want
    assert here <= 4096
    assert here + beside >= chars
    assert jobs <= len(texts) / 64 + 1
    with pytest.raises(InvalidRequestError, match=r"input\[300\]: input must not be empty"):
        async with AsyncEngine.open(small_config(decoder)) as engine:
            await engine.embed([*texts[:300], "", *texts[300:]])


@pytest.mark.parametrize("ends", ["deadline", "abort"])
async def test_a_call_ends_while_its_texts_are_tokenized(
    decoder: Path, held_tokenizer: threading.Event, ends: str
) -> None:
    async with AsyncEngine.open(small_config(decoder)) as engine:
        timeout, error = (0.1, DeadlineExceededError) if ends == "deadline" else (60.0, None)
        call = engine.embed(["the quick brown fox"] * 2, request_id="mine", timeout=timeout)
        many = asyncio.create_task(call)
        if ends == "abort":
            while "mine" not in engine._admissions.unfinished:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            assert engine.abort("mine")
        async with asyncio.timeout(60):
            with pytest.raises(error or RequestAbortedError):
                await many
        held_tokenizer.set()
        assert len(await engine.embed(["the quick brown fox"], timeout=60.0)) == 1
        assert_idle(engine)
