"""HTTP/1.1 on plain sockets, because client libraries cannot stop in the middle of a message."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec

from src.bench.server_process import HOST

_PIECE: Final = 65536
_CLOSE: Final = {"Connection": "close"}


class BrokenAnswer(Exception):
    """The received data is not a complete HTTP answer."""


class Reply(msgspec.Struct, frozen=True):
    """A complete answer; names in ``headers`` are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, decoded.

        Raises
        ------
        BrokenAnswer
            It is not JSON.
        """
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise BrokenAnswer(f"no JSON: {self.body[:100]!r}") from error

    def events(self) -> list[Any]:
        """The decoded data of a stream's server-sent events, without the final ``[DONE]``.

        Raises
        ------
        BrokenAnswer
            The stream has no end, or an event is not JSON.
        """
        data = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        if not data or data[-1] != b"[DONE]":
            raise BrokenAnswer(f"a stream without its end: {self.body[-100:]!r}")
        try:
            return [json.loads(event) for event in data[:-1]]
        except ValueError as error:
            raise BrokenAnswer(f"an event that is no JSON: {error}") from error


def post(path: str, body: bytes, headers: Mapping[str, str] = _CLOSE) -> bytes:
    """The bytes of a request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def get(path: str, headers: Mapping[str, str] = _CLOSE, method: str = "GET") -> bytes:
    """The bytes of a request without a body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name}: {value}" for name, value in {**_CLOSE, **headers}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@contextlib.asynccontextmanager
async def connected(
    port: int, *, reset: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is closed after the block: normally, or with a reset."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        yield reader, writer
    finally:
        if reset:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def exchange(port: int, request: bytes, *, pause: float = 0.0) -> Reply:
    """Send a request that asks to close the connection, and read the whole answer.

    Parameters
    ----------
    pause
        Seconds between two reads, which are then small.

    Raises
    ------
    BrokenAnswer
        There is no answer, or it is incomplete.
    """
    async with connected(port) as (reader, writer):
        # A server that refuses a body need not read it.
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
        received = bytearray()
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1024 if pause else _PIECE):
                received += piece
                if pause:
                    await asyncio.sleep(pause)
    return parse(bytes(received))


async def send_part(port: int, request: bytes, *, reset: bool) -> None:
    """Send data, and disconnect."""
    async with connected(port, reset=reset) as (_, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()


async def read_part(port: int, request: bytes, count: int, *, reset: bool) -> bytes:
    """Send a request, read up to ``count`` bytes of the answer, and disconnect."""
    received = bytearray()
    async with connected(port, reset=reset) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
            while len(received) < count and (piece := await reader.read(count - len(received))):
                received += piece
    return bytes(received)


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Read the next answer from a connection that stays open.

    Raises
    ------
    BrokenAnswer
        The connection ended before the answer was complete.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status, headers = _head(head[:-4])
        if headers.get("transfer-encoding") == "chunked":
            body = bytearray()
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readuntil(b"\r\n")
            return Reply(status, headers, bytes(body))
        return Reply(
            status, headers, await reader.readexactly(int(headers.get("content-length", "0")))
        )
    except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
        raise BrokenAnswer(f"the connection ended in an answer: {error}") from error


def parse(received: bytes) -> Reply:
    """Parse a complete answer.

    Raises
    ------
    BrokenAnswer
        It is not an answer, or it is incomplete.
    """
    head, separator, body = received.partition(b"\r\n\r\n")
    if not separator:
        raise BrokenAnswer(f"no answer: {received[:100]!r}")
    status, headers = _head(head)
    if headers.get("transfer-encoding") == "chunked":
        return Reply(status, headers, _unchunked(body))
    length = headers.get("content-length")
    if length is not None and len(body) != int(length):
        raise BrokenAnswer(f"{len(body)} bytes of {length}")
    return Reply(status, headers, body)


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split()
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise BrokenAnswer(f"no status line: {first[:100]!r}")
    pairs = (line.partition(":") for line in lines)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


def _unchunked(body: bytes) -> bytes:
    whole = bytearray()
    place = 0
    while True:
        end = body.find(b"\r\n", place)
        try:
            size = int(body[place:end], 16) if end >= 0 else -1
        except ValueError:
            size = -1
        begin = end + 2
        if size < 0 or len(body) < begin + size + 2:
            raise BrokenAnswer(f"a stream that breaks off: {body[-100:]!r}")
        if size == 0:
            return bytes(whole)
        whole += body[begin : begin + size]
        place = begin + size + 2
