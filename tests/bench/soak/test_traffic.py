"""Clients that hurt, against servers that are wrong on purpose: each fault must be seen."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from src.bench.soak.exchange import BrokenAnswer
from src.bench.soak.questions import COMPLETIONS, Answered, Question, make_questions
from src.bench.soak.traffic import Traffic, Wrong

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

QUESTION = Question(COMPLETIONS, {"prompt": "a"})
ANSWER = Answered((("right", "stop"),), 3)


def answer_of(text: str, status: int = 200, more: str = "") -> bytes:
    body = json.dumps(
        {
            "choices": [{"text": text, "finish_reason": "stop"}],
            "usage": {"completion_tokens": 3},
        }
    )
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{more}\r\n{body}".encode()


@contextlib.asynccontextmanager
async def server(answer: bytes) -> AsyncIterator[int]:
    """Answers everything with the same bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(65536)
            writer.write(answer)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


def traffic(port: int) -> Traffic:
    made = Traffic(
        port,
        questions=[QUESTION],
        answers=[ANSWER],
        vocab_size=100,
        max_model_len=128,
        capacity=4,
        admin_headers={},
        seed=1,
    )
    # As whole answers, which these servers give.
    made._random.random = lambda: 0.99  # type: ignore[method-assign]
    return made


async def act(answer: bytes, kind: str) -> object:
    async with server(answer) as port:
        acts = {name: act for name, _, act in traffic(port).kinds}
        return await acts[kind]()


async def test_a_right_answer_is_right() -> None:
    assert await act(answer_of("right"), "question") == "answered"


async def test_a_wrong_answer_is_seen() -> None:
    with pytest.raises(Wrong, match=r"answers .*wrong.* alone it was .*right"):
        await act(answer_of("wrong"), "question")


async def test_a_refusal_says_when_to_come_again() -> None:
    assert await act(answer_of("", 429, "Retry-After: 1\r\n"), "question") == "refused"
    with pytest.raises(Wrong, match="status 429"):
        await act(answer_of("", 429), "question")


@pytest.mark.parametrize("kind", ["question", "long output", "deadline", "operator", "malformed"])
async def test_a_failure_of_the_server_is_seen(kind: str) -> None:
    with pytest.raises(Wrong, match="500"):
        await act(answer_of("", 500), kind)


async def test_a_malformed_request_must_not_be_answered() -> None:
    with pytest.raises(Wrong, match="answers 200"):
        await act(answer_of("right"), "malformed")


async def test_half_an_answer_is_seen() -> None:
    with pytest.raises(BrokenAnswer):
        await act(answer_of("right")[:-5], "question")


async def test_too_few_tokens_are_seen() -> None:
    with pytest.raises(Wrong, match="tokens were asked for"):
        await act(answer_of("right"), "long output")


async def test_a_choice_that_was_not_offered_is_seen() -> None:
    with pytest.raises(Wrong, match="a choice of"):
        await act(answer_of("perhaps"), "constrained")


async def test_a_burst_counts_who_was_refused() -> None:
    async with server(answer_of("", 429, "Retry-After: 1\r\n")) as port:
        assert await traffic(port).burst() == {"refused": 8}


async def test_clients_that_leave_leave_whatever_is_said() -> None:
    for kind in ("leaves while it reads", "leaves while it sends"):
        assert await act(answer_of("right"), kind) == "left"


def test_questions_depend_on_their_seed_only() -> None:
    made = make_questions(30, 500, 256, seed=3)
    assert made == make_questions(30, 500, 256, seed=3)
    assert made != make_questions(30, 500, 256, seed=4)
    assert {question.path for question in made} == {COMPLETIONS, "/v1/chat/completions"}
    # What is drawn is drawn from a seed of its own, or it could not be known beforehand.
    assert all(q.fields["temperature"] == 0 or "seed" in q.fields for q in made)
