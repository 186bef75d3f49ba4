"""HTTP connections that wake nobody before an answer has ended.

Who measures a server on the same machine takes the processor time that it measures. A client that
hands each piece of a stream to a coroutine takes 40 microseconds a token, a fifth of what a small
model's server takes; one that notes the piece and its time takes 16 (`benchmarks/LOG.md`).
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

import msgspec

from src.bench.errors import BenchError, require

_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# What a path and a query may have unquoted, and "%", since they may be quoted already.
_SAFE: Final = "/?:@!$&'()*+,;=-._~%"


class Reply(msgspec.Struct):
    """A response, and when each piece of its body came (`time.perf_counter`)."""

    status: int
    pieces: list[tuple[float, bytes]]

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class Connections:
    """Connections to one address, as many as there are requests at once; they are kept.

    No proxy is used, and no redirection followed: what is measured is the server that was named.
    """

    def __init__(self, url: str, verify: bool = True) -> None:
        parts = urlsplit(url)
        tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            tls = ssl.create_default_context() if verify else ssl._create_unverified_context()
        try:
            port = parts.port or (443 if tls else 80)
        except ValueError as error:
            raise BenchError(f"{url}: {error}") from None
        self._tls = tls
        self._address = (parts.hostname or "", port)
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        self._begin = f"POST {quote(target, safe=_SAFE)} HTTP/1.1\r\n"
        self._headers = _headers_of(parts)
        self._parser = require("httptools").HttpResponseParser
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._is_closed = False

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, verify: bool = True) -> AsyncIterator[Connections]:
        """Those to the address of a URL, to whose path everything is sent; closed at the end.

        Raises
        ------
        BenchError
            The URL has no address, or httptools is not installed.
        """
        connections = cls(url, verify)
        try:
            yield connections
        finally:
            connections._is_closed = True
            for connection in connections._open:
                connection.abort()
            # A transport is closed in the loop's next turn.
            await asyncio.sleep(0)

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
        # One of a kind, however it is spelt; the length is ours to say.
        named = {
            name.lower(): (name, value) for name, value in {**self._headers, **headers}.items()
        }
        named["content-length"] = ("Content-Length", str(len(body)))
        head = self._begin + header_lines(dict(named.values()))
        connection = await self._take()
        try:
            reply = await connection.exchange(head.encode("ascii") + body)
        except BaseException:
            self._open.discard(connection)
            # At once, not when all is sent to somebody who may take nothing.
            connection.abort()
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
        transport, connection = await loop.create_connection(
            lambda: _Connection(self._parser),
            *self._address,
            ssl=self._tls,
        )
        if self._is_closed:
            transport.abort()
            raise ConnectionAbortedError("the client was closed")
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


def _headers_of(parts: SplitResult) -> dict[str, str]:
    """What an address says that every request carries."""
    headers = {"Host": parts.netloc.rpartition("@")[2]}
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(secret).decode()}"
    return headers


class _Connection(asyncio.Protocol):
    """One request at a time. Methods named ``on_`` are the parser's."""

    def __init__(self, parser: Any) -> None:
        self._new_parser = parser
        self._transport: asyncio.Transport | None = None
        # While somebody waits for it.
        self._answer: asyncio.Future[Reply] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = self._new_parser(self)
        self._pieces: list[tuple[float, bytes]] = []
        self._now = 0.0
        self._has_length = self._has_headers = False

    @property
    def is_open(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Hang up at once; whoever waits is told."""
        self._fail(ConnectionAbortedError("the client hung up"))
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes) -> Reply:
        self._begin()
        if self._transport is None:
            raise ConnectionResetError("the server hung up")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    # asyncio's.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            # Nobody has asked, so it must not be taken for the next answer.
            self.abort()
            return
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except Exception as error:
            # Also what the parser has no name for: whoever waits is told.
            self._fail(ValueError(f"this is no HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        # HTTP/1.0 ends a body by hanging up.
        if exc is None and self._has_headers and not self._has_length:
            self._finish()
        self._fail(exc or ConnectionResetError("the server hung up"))

    # The parser's.

    def on_header(self, name: bytes, _: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        # 100 says that something follows.
        self._has_headers = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        self._pieces.append((self._now, body))

    def on_message_begin(self) -> None:
        if self._answer is None:
            self.abort()

    def on_message_complete(self) -> None:
        if not self._has_headers:
            return
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        self._finish()

    def _finish(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(Reply(self._parser.get_status_code(), self._pieces))
        # What comes behind it is no part of it.
        self._pieces = []

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
