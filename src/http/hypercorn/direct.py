"""Streamed writes under hypercorn without its machinery: for the next piece of a begun answer.

Between an ASGI ``send`` and the socket, hypercorn 0.18 runs four coroutines, a lock, two frozen
dataclasses and h11's state machine, of which the next chunk of a chunked HTTP/1.1 answer needs
nothing: no state changes. So where the server is exactly that, and only then, such a chunk is
written to the connection itself, by way of the outbox. Everything else (the head, the end, what
must wait for a reader, HTTP/2, TLS handshakes, other servers) goes the ordinary way.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from starlette.types import Scope, Send

from src.http.hypercorn.outbox import Connection, Outbox

# Where the server's own `send` is found, beneath the framework's wrappers around it.
SERVER_SEND: Final = "slipstream.send"
# Bytes that wait for the reader at most before a write waits too: asyncio's own high-water mark.
_MAX_WAITING: Final = 64 * 1024


class DirectWriter(Connection):
    """Writes chunks of one answer; what goes the ordinary way does so while it is `held`."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Any, transport: Any, outbox: Outbox) -> None:
        super().__init__(outbox, transport)
        self._stream = stream

    @property
    def is_ready(self) -> bool:
        """Whether a chunk may be written; when the reader is behind or gone it may not."""
        return not (
            self.waiting > _MAX_WAITING or self._stream.closed or self._transport.is_closing()
        )

    def write(self, data: bytes) -> None:
        """Write a chunk, when `is_ready`."""
        super().write(b"%x\r\n%b\r\n" % (len(data), data))


def direct_writer(scope: Scope, outbox: Outbox) -> DirectWriter | None:
    """The writer of an answer whose head, without a length, has just been sent.

    ``None`` where the server is another one, or this connection is of another kind.
    """
    if scope["http_version"] != "1.1" or scope["method"] == "HEAD":
        return None
    if (found := _connection(scope)) is None:
        return None
    import h11

    stream, protocol, transport = found
    if protocol.connection.our_state is not h11.SEND_BODY:
        return None
    return DirectWriter(stream, transport, outbox)


def abort_connection(scope: Scope) -> None:
    """End the connection at once, with whatever waits in it, where nothing else may go over it.

    That is under hypercorn with HTTP/1; elsewhere nothing happens.
    """
    if (found := _connection(scope)) is not None:
        found[2].abort()


def _connection(scope: Scope) -> tuple[Any, Any, Any] | None:
    """Hypercorn's stream, protocol and transport of an HTTP/1 request; None elsewhere."""
    send: Send | None = scope.get(SERVER_SEND)
    stream = getattr(send, "__self__", None)
    if stream is None or "hypercorn.asyncio.tcp_server" not in sys.modules:
        return None
    import h11
    from hypercorn.asyncio.tcp_server import TCPServer
    from hypercorn.protocol.h11 import H11Protocol
    from hypercorn.protocol.http_stream import HTTPStream

    protocol: Any = getattr(getattr(stream, "send", None), "__self__", None)
    server: Any = getattr(getattr(protocol, "send", None), "__self__", None)
    if type(stream) is not HTTPStream or type(server) is not TCPServer:
        return None
    if type(protocol) is not H11Protocol or type(protocol.connection) is not h11.Connection:
        return None
    return stream, protocol, server.writer.transport
