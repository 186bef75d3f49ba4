"""Attacks by which one client could block others; each is the data of a whole connection.

A sound server answers or refuses each of them, and serves all other clients meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from src.bench.soak.exchange import post
from src.bench.soak.questions import CHAT, COMPLETIONS

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# :method GET, :scheme http and :path /, as encoded by HPACK's static table.
_FIELDS: Final = b"\x82\x86\x84"
_HEADERS, _PRIORITY, _RESET, _SETTINGS, _PING = 1, 2, 3, 4, 6
_END_OF_STREAM_AND_HEADERS: Final = 5
_FRAMES: Final = 2000
# Number of spaces that the server must hold back, because they begin a stop string.
_HELD: Final = 900


class Attack(NamedTuple):
    """The data of one connection, and how an answer may begin; no answer is allowed too."""

    name: str
    request: bytes
    answers: tuple[bytes, ...]


def attacks(space_id: int, max_tokens: int, choices: int) -> list[Attack]:
    """All attacks.

    Parameters
    ----------
    space_id
        Token id of a single space.
    max_tokens, choices
        Size of an answer that the server allows.
    """
    refused = (b"HTTP/1.1 4", b"HTTP/1.1 505")
    served = (b"HTTP/1.1 200", b"HTTP/1.1 4")
    return [
        Attack("held text", _held_text(space_id, max_tokens, choices), served),
        Attack("unknown token", post(CHAT, _said("hi <|new|>")), served),
        Attack("resets", _PREFACE + _joined(_rapid_resets()), refused),
        Attack("settings", _PREFACE + _frame(_SETTINGS) * _FRAMES, refused),
        Attack("pings", _PREFACE + _frame(_PING, bytes(8)) * _FRAMES, refused),
        Attack("priorities", _PREFACE + _joined(_priorities()), refused),
        Attack("upgrade", _upgrade(), (b"HTTP/1.1 200", *refused)),
        Attack("two lengths", _two_lengths(), refused),
        Attack("many keys", _many_keys(), served),
        Attack("many vectors", _many_vectors(), served),
    ]


def _held_text(space_id: int, max_tokens: int, choices: int) -> bytes:
    """A grammar that can never end, and stop strings that might begin at every character."""
    fields = {
        "prompt": "a",
        "max_tokens": max_tokens,
        "n": choices,
        "guided_regex": " *zq",
        "allowed_token_ids": [space_id],
        "stop": [" " * _HELD + "x", *(" " * length for length in range(1, 16))],
        "stream": True,
    }
    return post(COMPLETIONS, json.dumps(fields).encode())


def _said(text: str) -> bytes:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return json.dumps(fields).encode()


def _rapid_resets() -> Iterator[bytes]:
    for stream in range(1, 2 * _FRAMES, 2):
        yield _frame(_HEADERS, _FIELDS, stream, _END_OF_STREAM_AND_HEADERS)
        yield _frame(_RESET, bytes(4), stream)


def _priorities() -> Iterator[bytes]:
    return (_frame(_PRIORITY, bytes(5), stream) for stream in range(1, 2 * _FRAMES, 2))


def _upgrade() -> bytes:
    lines = (
        "GET /live HTTP/1.1",
        "Host: localhost",
        "Connection: Upgrade, HTTP2-Settings, close",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA",
    )
    # If the server upgrades the connection to HTTP/2, it gets the flood.
    return _lines(lines) + _PREFACE + _joined(_rapid_resets())


def _two_lengths() -> bytes:
    lines = (
        f"POST {COMPLETIONS} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Content-Length: 5",
        "Transfer-Encoding: chunked",
    )
    return _lines(lines) + b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def _many_keys() -> bytes:
    """Requests whose answers are stored, each with another API key, on one connection."""
    body = json.dumps({"input": "hi", "max_output_tokens": 16}).encode()
    kept = [
        post("/v1/responses", body, {"Connection": "keep-alive", "x-api-key": f"made-up-{number}"})
        for number in range(20)
    ]
    return b"".join(kept) + post("/v1/responses", body)


def _many_vectors() -> bytes:
    """As many texts as a request may have, with as long a text as is let in among them."""
    texts = [[5 + number % 200] * 4 for number in range(2047)]
    body = json.dumps({"input": [*texts, "a b " * 40_000], "truncate_prompt_tokens": -1})
    mixed = json.dumps({"input": [*texts, [7] * 60]})
    kept = post("/v1/embeddings", body.encode(), {"Connection": "keep-alive"})
    return kept + post("/v1/embeddings", mixed.encode())


def _lines(lines: Iterable[str]) -> bytes:
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _frame(kind: int, payload: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags))
    return head + stream.to_bytes(4, "big") + payload


def _joined(frames: Iterable[bytes]) -> bytes:
    return b"".join(frames)
