"""HTTP connections that wake no coroutine before an answer has ended.

A load generator on the server's machine takes CPU time from the server. Passing each piece of a
stream to a coroutine costs 40 microseconds per token, a fifth of what a small model's server needs.
Only recording each piece and its time costs 16 (`benchmarks/LOG.md`).
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
# Characters that stay unquoted in path and query; "%", because they may be quoted already.
_SAFE: Final = "/?:@!$&'()*+,;=-._~%"


class Reply(msgspec.Struct):
    """A response, and the arrival time of each piece of its body (`time.perf_counter`)."""

    status: int
    pieces: list[tuple[float, bytes]]

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class Connections:
    """Persistent connections to one address, one per concurrent request.

    Proxies are not used and redirections not followed, because the named server is to be measured.
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
        """Connections to a URL's address; requests go to its path; closed at the end.

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
            # A transport is only closed in the loop's next iteration.
            await asyncio.sleep(0)

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Send a body, and wait for the whole answer.

        Raises
        ------
        BenchError
            A header is invalid.
        OSError
            The connection failed or broke off.
        ValueError
            The answer is not valid HTTP.
        """
        # One header per name, whatever its case; the length is set here.
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
            # `abort`, because `close` would first send everything, to a peer that may not read.
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
    """Header fields in wire format, including the empty line after them.

    Raises
    ------
    BenchError
        A name or a value is not allowed in HTTP.
    """
    for name, value in headers.items():
        if not (_TOKEN.fullmatch(name) and value.isascii()) or _CONTROL.search(value):
            raise BenchError(f"the header {name!r} cannot be sent")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"


def _headers_of(parts: SplitResult) -> dict[str, str]:
    """The headers that an address implies for every request."""
    headers = {"Host": parts.netloc.rpartition("@")[2]}
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(secret).decode()}"
    return headers


class _Connection(asyncio.Protocol):
    """A connection with one request at a time. Methods named ``on_`` are the parser's callbacks."""

    def __init__(self, parser: Any) -> None:
        self._new_parser = parser
        self._transport: asyncio.Transport | None = None
        # Set while a request is in progress.
        self._answer: asyncio.Future[Reply] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = self._new_parser(self)
        self._pieces: list[tuple[float, bytes]] = []
        self._now = 0.0
        self._has_length = self._has_headers = False

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close the connection at once; a waiting request fails."""
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

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            # Unrequested data must not be taken for the next answer.
            self.abort()
            return
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except Exception as error:
            # Any error of the parser makes the waiting request fail.
            self._fail(ValueError(f"this is no HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        # In HTTP/1.0, closing the connection ends the body.
        if exc is None and self._has_headers and not self._has_length:
            self._finish()
        self._fail(exc or ConnectionResetError("the server hung up"))

    # Callbacks of the parser.

    def on_header(self, name: bytes, _: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        # After a status of the 100 class, the actual response follows.
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
        # Data after the end does not belong to this answer.
        self._pieces = []

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
