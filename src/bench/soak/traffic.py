"""Behaviours of clients: one per method, with checks of what the server must not do.

Each returns its outcome in a word, or raises `Wrong`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from src.bench.soak.attacks import attacks
from src.bench.soak.exchange import (
    BrokenAnswer,
    Reply,
    connected,
    exchange,
    get,
    post,
    read_part,
    read_reply,
    send_part,
)
from src.bench.soak.questions import CHAT, COMPLETIONS, Answered, Question, answered

RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
_KEEP: Final = {"Connection": "keep-alive"}
_CHOICES: Final = ("yes", "no", "maybe")
# Invalid HTTP, which must be refused or close the connection.
_NOISE: Final = (
    b"nonsense\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
    b"GET /live HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\r\n" * 20,
)
# (path, body) of requests that must be refused with a status from 400 to 499.
_BAD: Final = (
    (COMPLETIONS, b""),
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b'{"prompt": "a", "max_tokens": -1}'),
    (COMPLETIONS, b'{"prompt": "a", "temperature": "hot"}'),
    (COMPLETIONS, b'{"prompt": [[]]}'),
    (COMPLETIONS, b'{"prompt": [1, 999999999]}'),
    (COMPLETIONS, b'{"prompt": "a", "n": 1000000}'),
    (COMPLETIONS, b'{"prompt": "a", "max_tokens": 1000000000}'),
    (COMPLETIONS, b'{"prompt": "a", "structured_outputs": {"regex": "("}}'),
    (COMPLETIONS, b"\xff\xfe\x00"),
    (CHAT, b'{"messages": []}'),
    (CHAT, b'{"messages": [{"role": "nobody", "content": "a"}]}'),
    (CHAT, b"[" * 10_000),
    (RESPONSES, b'{"input": 7}'),
    (RESPONSES, b'{"input": "a", "previous_response_id": "resp_unknown"}'),
    (MESSAGES, b'{"messages": [{"role": "user", "content": "a"}]}'),
    ("/v1/nowhere", b"{}"),
    ("/tokenize", b'{"tokens": 1}'),
)


# Duration of one attack in seconds.
_ATTACK_SECONDS: Final = 2.0

# Returns the outcome in a word, or several outcomes with counts.
Act = Callable[[], Awaitable[str | Counter[str]]]


class Wrong(Exception):
    """The server did what it must not do."""


class Traffic:
    """Clients of one server.

    Parameters
    ----------
    questions, answers
        Questions, and their answers from the idle server.
    capacity
        Number of requests that the server can hold, running and waiting.
    space_id
        Token id of a single space.
    """

    def __init__(
        self,
        port: int,
        *,
        questions: Sequence[Question],
        answers: Sequence[Answered],
        vocab_size: int,
        max_model_len: int,
        capacity: int,
        admin_headers: dict[str, str],
        seed: int,
        space_id: int = 3,
    ) -> None:
        self.capacity = capacity
        self._port = port
        self._known = list(zip(questions, answers, strict=True))
        self._ids = range(3, vocab_size)
        self._max_model_len = max_model_len
        self._admin_headers = admin_headers
        self._random = random.Random(seed)
        self._attacks = attacks(space_id, max_tokens=max_model_len // 2, choices=4)
        self._shared = self._random.choices(self._ids, k=max_model_len // 3)
        # (name, weight, method): weights are relative frequencies.
        self.kinds: list[tuple[str, int, Act]] = [
            ("question", 30, self._question),
            ("long prompt", 8, self._long_prompt),
            ("long output", 6, self._long_output),
            ("shared prefix", 12, self._shared_prefix),
            ("several", 6, self._several),
            ("other protocol", 10, self._other_protocol),
            ("constrained", 4, self._constrained),
            ("leaves while it reads", 14, self._leaves_reading),
            ("leaves while it sends", 8, self._leaves_sending),
            ("malformed", 12, self._malformed),
            ("noise", 4, self._noise),
            ("attack", 8, self._attack),
            ("deadline", 4, self._deadline),
            ("slow reader", 2, self._slow_reader),
            ("deaf reader", 1, self._deaf_reader),
            ("kept connection", 4, self._kept_connection),
            ("cancelled", 3, self._cancelled),
            ("operator", 5, self._operator),
        ]

    def draw(self) -> tuple[str, Act]:
        """A random behaviour: its name, and its method."""
        weights = [weight for _, weight, _ in self.kinds]
        name, _, act = self._random.choices(self.kinds, weights)[0]
        return name, act

    async def burst(self) -> Counter[str]:
        """Send twice as many short requests as there is room for; each must get an answer."""
        bodies = [{"prompt": self._ids_of(8), "max_tokens": 4} for _ in range(2 * self.capacity)]
        replies = await asyncio.gather(*(self._post(COMPLETIONS, body) for body in bodies))
        return Counter(map(_outcome, replies))

    # Requests with known answers.

    async def _question(self) -> str:
        return await self._ask(*self._random.choice(self._known))

    async def _ask(self, question: Question, expected: Answered) -> str:
        stream = self._random.random() < 0.6
        reply = await exchange(self._port, question.request(stream=stream))
        outcome = _outcome(reply)
        if outcome == "answered":
            _compare(question, expected, answered(reply, stream=stream))
        return outcome

    async def _kept_connection(self) -> str:
        """Several questions on one connection, one after another."""
        async with connected(self._port) as (reader, writer):
            for _ in range(self._random.randint(2, 4)):
                question, expected = self._random.choice(self._known)
                stream = self._random.random() < 0.5
                body = json.dumps(question.asked(stream=stream)).encode()
                writer.write(post(question.path, body, _KEEP))
                reply = await read_reply(reader)
                if _outcome(reply) != "answered":
                    return "refused"
                _compare(question, expected, answered(reply, stream=stream))
        return "answered"

    async def _slow_reader(self) -> str:
        question, expected = self._random.choice(self._known)
        reply = await exchange(self._port, question.request(stream=True), pause=0.02)
        outcome = _outcome(reply)
        if outcome == "answered":
            _compare(question, expected, answered(reply, stream=True))
        return outcome

    # Requests with unknown answers, whose form is checked.

    async def _long_prompt(self) -> str:
        return await self._generate(self._ids_of(self._max_model_len - 24), max_tokens=8)

    async def _long_output(self) -> str:
        most = max(2, min(self._max_model_len // 2, 300))
        return await self._generate(self._ids_of(8), max_tokens=self._random.randint(2, most))

    async def _shared_prefix(self) -> str:
        prompt = self._shared[: self._random.randint(1, len(self._shared))] + self._ids_of(12)
        return await self._generate(prompt, max_tokens=self._random.randint(1, 24))

    async def _several(self) -> str:
        more = {"n": self._random.randint(2, 5), "logprobs": 3, "temperature": 1.0}
        return await self._generate(self._ids_of(20), max_tokens=16, **more)

    async def _generate(self, prompt: list[int], max_tokens: int, **more: Any) -> str:
        """Check that each choice has exactly the requested tokens, streamed or not."""
        stream = self._random.random() < 0.5
        fields = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}
        question = Question(COMPLETIONS, fields)
        reply = await exchange(self._port, question.request(stream=stream))
        if (outcome := _outcome(reply)) == "answered":
            found = answered(reply, stream=stream)
            wanted = max_tokens * more.get("n", 1)
            if found.completion_tokens != wanted or {end for _, end in found.choices} != {"length"}:
                raise Wrong(f"{wanted} tokens were asked for, got {found}")
        return outcome

    async def _constrained(self) -> str:
        fields = {"prompt": "is it so?", "structured_outputs": {"choice": list(_CHOICES)}}
        reply = await self._post(COMPLETIONS, {**fields, "max_tokens": 16})
        if (outcome := _outcome(reply)) == "answered":
            text = reply.json()["choices"][0]["text"]
            if text not in _CHOICES:
                raise Wrong(f"a choice of {_CHOICES} was asked for, got {text!r}")
        return outcome

    async def _other_protocol(self) -> str:
        say = " ".join(map(str, self._ids_of(6)))
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": say}], "max_tokens": 8}
        bodies: dict[str, dict[str, Any]] = {
            RESPONSES: {"input": say, "max_output_tokens": 16},
            MESSAGES: chat,
            CHAT: chat,
            "/tokenize": {"prompt": say},
        }
        path = self._random.choice(list(bodies))
        reply = await self._post(path, bodies[path])
        if (outcome := _outcome(reply)) == "answered":
            reply.json()
        return outcome

    async def _deadline(self) -> str:
        """A request with a deadline ends with partial output, or with an error if it has none."""
        fields = {"prompt": self._ids_of(8), "max_tokens": 200, "ignore_eos": True}
        reply = await self._post(
            COMPLETIONS, {**fields, "timeout": self._random.choice((0.001, 0.05, 0.3))}
        )
        if reply.status == 408:
            return "too late"
        return _outcome(reply)

    async def _cancelled(self) -> str:
        """Cancel a background response while it runs or soon after, then delete it."""
        fields = {"input": "hello", "background": True, "ignore_eos": True}
        reply = await self._post(RESPONSES, {**fields, "max_output_tokens": 64})
        if (outcome := _outcome(reply)) != "answered":
            return outcome
        path = f"{RESPONSES}/{reply.json()['id']}"
        await asyncio.sleep(self._random.random() * 0.1)
        ended = await exchange(self._port, post(f"{path}/cancel", b""))
        # It may have finished, or may have been evicted from the store.
        if ended.status not in (200, 400, 404, 409):
            raise Wrong(f"a cancellation is answered {ended.status}: {ended.body[:200]!r}")
        await exchange(self._port, get(path, method="DELETE"))
        return "cancelled"

    # Misbehaving clients.

    async def _leaves_reading(self) -> str:
        fields = {"prompt": self._ids_of(10), "max_tokens": 200, "ignore_eos": True}
        body = json.dumps({**fields, "stream": self._random.random() < 0.8}).encode()
        await read_part(
            self._port,
            post(COMPLETIONS, body),
            self._random.choice((0, 1, self._random.randint(1, 6000))),
            reset=self._random.random() < 0.5,
        )
        return "left"

    async def _leaves_sending(self) -> str:
        body = json.dumps({"prompt": self._ids_of(50), "max_tokens": 50}).encode()
        request = post(COMPLETIONS, body)
        cut = self._random.randint(1, len(request))
        await send_part(self._port, request[:cut], reset=self._random.random() < 0.5)
        return "left"

    async def _deaf_reader(self) -> str:
        """Request much output without reading it; the server must give up the connection."""
        fields = {"prompt": "x", "n": 2, "max_tokens": 300, "ignore_eos": True, "logprobs": 20}
        request = post(COMPLETIONS, json.dumps({**fields, "stream": True}).encode())
        async with connected(self._port) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request)
            await asyncio.sleep(1.0)
        return "left"

    async def _malformed(self) -> str:
        path, body = self._random.choice(_BAD)
        reply = await exchange(self._port, post(path, body))
        if not 400 <= reply.status < 500:
            raise Wrong(f"{path} answers {reply.status} to {body[:80]!r}: {reply.body[:200]!r}")
        if reply.status != 429 and "error" not in reply.json():
            raise Wrong(f"{path} answers {body[:80]!r} without an error: {reply.body[:200]!r}")
        return "refused by name"

    async def _noise(self) -> str:
        noise = self._random.choice(_NOISE)
        received = await read_part(self._port, noise, 12, reset=False)
        if received and not received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 2")):
            raise Wrong(f"{received!r} is the answer to {noise[:60]!r}")
        return "refused" if received else "closed"

    async def _attack(self) -> str:
        """Attack the server for a while, then disconnect."""
        attack = self._random.choice(self._attacks)
        received = b""
        async with connected(self._port, reset=True) as (reader, writer):
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_ATTACK_SECONDS):
                    writer.write(attack.request)
                    await writer.drain()
                    while piece := await reader.read(65536):
                        received = received or piece
        if received and not received.startswith(attack.answers):
            raise Wrong(f"{attack.name}: the answer begins with {received[:80]!r}")
        return f"{attack.name}: {'answered' if received else 'closed'}"

    async def _operator(self) -> str:
        """Read the operator's endpoints of a busy server."""
        path = self._random.choice(
            ("/metrics", "/health", "/v1/models", "/debug/requests", "/debug/pool", "/debug/plan",
             "/debug/timeline?steps=20&format=records", "/get_load"),
        )  # fmt: skip
        reply = await exchange(self._port, get(path, self._admin_headers))
        if reply.status != 200:
            raise Wrong(f"{path} answers {reply.status}: {reply.body[:200]!r}")
        return "answered"

    async def _post(self, path: str, fields: dict[str, Any]) -> Reply:
        return await exchange(self._port, post(path, json.dumps(fields).encode()))

    def _ids_of(self, count: int) -> list[int]:
        return self._random.choices(self._ids, k=max(1, count))


def _outcome(reply: Reply) -> str:
    """The outcome of a reply: answered, or refused because the server is full.

    Raises
    ------
    Wrong
        Neither is the case.
    """
    if reply.status == 200:
        return "answered"
    if reply.status == 429 and "retry-after" in reply.headers:
        return "refused"
    raise Wrong(f"status {reply.status}: {reply.body[:300]!r}")


def _compare(question: Question, expected: Answered, found: Answered) -> None:
    if found != expected:
        asked = msgspec.json.encode(question.fields).decode()
        raise Wrong(f"{question.path} {asked[:400]} answers {found}, alone it was {expected}")


# Exceptions of a behaviour that are the server's fault.
FAULTS: Final = (Wrong, BrokenAnswer, ConnectionError, KeyError, IndexError, TypeError)
