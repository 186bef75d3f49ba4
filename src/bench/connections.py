"""HTTP connections that wake nobody before an answer has ended.

Who measures a server on the same machine takes the processor time that it measures. A client that
hands each piece of a stream to a coroutine takes 40 microseconds a token, a fifth of what a small
model's server takes; one that notes the piece and its time takes 16 (`benchmarks/LOG.md`).
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from src.bench.errors import BenchError, require

_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class Reply(msgspec.Struct):
    """A response, and when each piece of its body came (`time.perf_counter`)."""

    status: int
    pieces: list[tuple[float, bytes]]

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class Connections:
    """Connections to one address, as many as there are requests at once; they are kept."""

    def __init__(self, url: str, verify: bool = True) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            verified = ssl.create_default_context
            self._tls = verified() if verify else ssl._create_unverified_context()
        self._port = parts.port or (443 if self._tls else 80)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        place = parts.netloc.rpartition("@")[2]
        self._begin = f"POST {path} HTTP/1.1\r\nHost: {place}\r\n"
        self._parser = require("httptools").HttpResponseParser
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, verify: bool = True) -> AsyncIterator[Connections]:
        """Those to the address of a URL, to whose path everything is sent; closed at the end.

        Raises
        ------
        BenchError
            httptools is not installed.
        """
        connections = cls(url, verify)
        try:
            yield connections
        finally:
            for connection in connections._open:
                connection.close()

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Send a body, and wait for the whole answer.

        Raises
        ------
        BenchError
            A header cannot be sent.
        OSError
            There is no connection, or it broke off.
        ValueError
            What came is no HTTP.
        """
        head = self._begin + header_lines({**headers, "Content-Length": str(len(body))})
        connection = await self._take()
        try:
            reply = await connection.exchange(head.encode("latin-1") + body)
        except BaseException:
            self._open.discard(connection)
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        else:
            self._open.discard(connection)
        return reply

    async def _take(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            self._open.discard(connection)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._parser), self._host, self._port, ssl=self._tls
        )
        self._open.add(connection)
        return connection


def header_lines(headers: Mapping[str, str]) -> str:
    """Header fields as they are sent, and the empty line behind them.

    Raises
    ------
    BenchError
        A name or a value is none of HTTP's.
    """
    for name, value in headers.items():
        if not (_TOKEN.fullmatch(name) and value.isascii()) or _CONTROL.search(value):
            raise BenchError(f"the header {name!r} cannot be sent")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"


class _Connection(asyncio.Protocol):
    """One request at a time. Methods named ``on_`` are the parser's."""

    def __init__(self, parser: Any) -> None:
        self._new_parser = parser
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = self._new_parser(self)
        self._pieces: list[tuple[float, bytes]] = []
        self._now = 0.0
        self._ends_itself = False

    @property
    def is_open(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def exchange(self, request: bytes) -> Reply:
        self._begin()
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport is None:
            raise ConnectionResetError("the server hung up")
        self._transport.write(request)
        return await self._answer

    # asyncio's.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except Exception as error:
            # Also what the parser has no name for: whoever waits is told.
            self._fail(ValueError(f"this is no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        # HTTP/1.0 ends a body by hanging up.
        has_status = bool(self._now) and self._parser.get_status_code() >= 200
        if exc is None and has_status and not self._ends_itself:
            self._finish()
        else:
            self._fail(exc or ConnectionResetError("the server hung up"))

    # The parser's.

    def on_header(self, name: bytes, _: bytes) -> None:
        self._ends_itself |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_body(self, body: bytes) -> None:
        self._pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        # 100 says that something follows.
        if self._parser.get_status_code() >= 200:
            if not self._parser.should_keep_alive():
                self.close()
            self._finish()

    def _finish(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Reply(self._parser.get_status_code(), self._pieces))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
