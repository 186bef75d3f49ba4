"""Questions with known answers, which an idle server gives before the load begins."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from src.bench.soak.exchange import BrokenAnswer, Reply, exchange, post

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_WORDS: Final = (
    "once",
    "upon",
    "a",
    "time",
    "there",
    "was",
    "little",
    "house",
    "and",
    "one",
    "day",
)


class Answered(msgspec.Struct, frozen=True):
    """Contents of an answer: text and finish reason per choice, and the number of tokens."""

    choices: tuple[tuple[str, str | None], ...]
    completion_tokens: int


class Question(msgspec.Struct, frozen=True):
    """A completion or chat request whose answer depends only on the request itself."""

    path: str
    fields: dict[str, Any]

    def request(self, *, stream: bool) -> bytes:
        """The request in wire format."""
        return post(self.path, json.dumps(self.asked(stream=stream)).encode())

    def asked(self, *, stream: bool) -> dict[str, Any]:
        """The fields of the request."""
        if not stream:
            return self.fields
        return {**self.fields, "stream": True, "stream_options": {"include_usage": True}}


def answered(reply: Reply, *, stream: bool) -> Answered:
    """Extract the contents of an answer with status 200.

    Raises
    ------
    BrokenAnswer
        It is incomplete.
    """
    try:
        return _streamed(reply.events()) if stream else _whole(reply.json())
    except (KeyError, IndexError, TypeError) as error:
        raise BrokenAnswer(f"not of the form it should be: {reply.body[:200]!r}") from error


def _whole(body: Any) -> Answered:
    choices = tuple((_text(c, "message"), c["finish_reason"]) for c in body["choices"])
    return Answered(choices, body["usage"]["completion_tokens"])


def _streamed(events: Sequence[Any]) -> Answered:
    texts: dict[int, str] = {}
    ends: dict[int, str | None] = {}
    tokens = -1
    for event in events:
        if "error" in event:
            raise BrokenAnswer(f"an error in a stream: {event['error']}")
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + _text(choice, "delta")
            ends[index] = choice.get("finish_reason") or ends.get(index)
    return Answered(tuple((texts[index], ends[index]) for index in sorted(texts)), tokens)


def _text(choice: dict[str, Any], where: str) -> str:
    if "text" in choice:
        return str(choice["text"])
    parts = choice[where]
    # Reasoning and content, if the model's parser separates them.
    return (parts.get("reasoning_content") or "") + (parts.get("content") or "")


def make_questions(count: int, vocab_size: int, max_model_len: int, seed: int) -> list[Question]:
    """Varied questions: greedy and seeded, token ids and text, shared prefixes, chats."""
    source = random.Random(seed)
    # Prompts with a shared prefix, so that some are answered from the prefix cache.
    shared = [source.randrange(3, vocab_size) for _ in range(max_model_len // 4)]
    made = []
    for number in range(count):
        fields: dict[str, Any] = {"max_tokens": source.randint(1, 48)}
        if number % 2:
            fields |= {"temperature": 0.9, "seed": number}
        else:
            fields["temperature"] = 0
        if number % 3 == 0:
            fields["ignore_eos"] = True
        if number % 7 == 0:
            fields |= {"n": 2, "stop": ["e"]}
        if number % 5 == 4:
            text = " ".join(source.choices(_WORDS, k=source.randint(1, 12)))
            made.append(Question(CHAT, {"messages": [{"role": "user", "content": text}], **fields}))
            continue
        if number % 5 == 3:
            fields["prompt"] = " ".join(source.choices(_WORDS, k=source.randint(1, 40)))
        else:
            begin = shared[: source.randint(0, len(shared))] if number % 5 else []
            rest = source.choices(range(3, vocab_size), k=source.randint(1, max_model_len // 8))
            fields["prompt"] = begin + rest
        made.append(Question(COMPLETIONS, fields))
    return made


async def answer_alone(port: int, questions: Sequence[Question]) -> list[Answered]:
    """The answers that an idle server gives, one question at a time.

    Raises
    ------
    BrokenAnswer
        An answer is invalid.
    """
    found = []
    for question in questions:
        reply = await exchange(port, question.request(stream=False))
        if reply.status != 200:
            raise BrokenAnswer(f"{question.path} answers {reply.status}: {reply.body[:200]!r}")
        found.append(answered(reply, stream=False))
    return found
