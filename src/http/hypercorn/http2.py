"""HTTP/2 under hypercorn: over TLS alone, and what a connection may ask for within bounds.

Hypercorn 0.18 turns any connection in clear text into one of HTTP/2, by prior knowledge or
`Upgrade`, and bounds no frame but those that open streams: 50 KB of streams that are opened and
reset at once, or of SETTINGS, keep the event loop for a second, and no key is needed. So frames are
counted by their headers, which is cheap, before anything is made of them.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_BYTES: Final = 9
# RFC 9113, section 6.
_DATA: Final = 0
_HEADERS: Final = 1
_RST_STREAM: Final = 3
_WINDOW_UPDATE: Final = 8
_CONTINUATION: Final = 9
# What a request is made of: the streams that are open at once bound it, and the sizes of bodies.
_OF_REQUESTS: Final = frozenset({_HEADERS, _CONTINUATION})
# GOAWAY of a last stream 0 with the code ENHANCE_YOUR_CALM (RFC 9113, sections 6.8 and 7).
_GO_AWAY: Final = b"\0\0\x08\x07\0\0\0\0\0" + b"\0\0\0\0" + b"\0\0\0\x0b"

# Frames at once, and a second. Clients reset the streams that they no longer want, and say that
# they have read; the rest is for the beginning of a connection.
RESETS: Final = (100, 10)
READ_MARKS: Final = (2000, 2000)
OTHERS: Final = (100, 10)


class Allowance:
    """How often something may happen: so often at once, and so often a second."""

    def __init__(self, rate: tuple[int, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._refill = rate
        self._clock = clock
        self._left: float = self._most
        self._updated = clock()

    def take(self, count: int) -> bool:
        """Whether it may happen so often now; it is counted."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._updated) * self._refill) - count
        self._updated = now
        return self._left >= 0


class FrameBudget:
    """Counts the frames of one connection, beginning with the client's preface."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._resets = Allowance(RESETS, clock)
        self._read_marks = Allowance(READ_MARKS, clock)
        self._others = Allowance(OTHERS, clock)
        # Bytes to pass over before the next header, and what has come of that.
        self._to_skip = len(_PREFACE)
        self._header = b""

    def take(self, data: bytes) -> bool:
        """Whether what has come is within bounds; frames may come in any pieces."""
        resets = read_marks = others = 0
        data, self._header = self._header + data, b""
        position, length = self._to_skip, len(data)
        while position + _HEADER_BYTES <= length:
            size, kind = int.from_bytes(data[position : position + 3]), data[position + 3]
            if kind == _RST_STREAM:
                resets += 1
            elif kind == _WINDOW_UPDATE:
                read_marks += 1
            elif kind not in _OF_REQUESTS and (kind != _DATA or size == 0):
                others += 1
            position += _HEADER_BYTES + size
        self._header = data[position:]
        self._to_skip = max(0, position - length)
        return (
            self._resets.take(resets)
            and self._read_marks.take(read_marks)
            and self._others.take(others)
        )


def bound_http2() -> None:
    """Have hypercorn refuse HTTP/2 without TLS, and bound it; does nothing under other servers."""
    if "hypercorn.asyncio.tcp_server" not in sys.modules:
        return
    from hypercorn.asyncio.tcp_server import TCPServer
    from hypercorn.protocol import ProtocolWrapper
    from hypercorn.protocol.h2 import H2Protocol
    from hypercorn.protocol.h11 import H11Protocol

    if hasattr(H2Protocol.handle, "__wrapped__"):
        return
    _refuse_clear_text(ProtocolWrapper, H11Protocol)
    _bound_frames(H2Protocol)
    _close_quietly(TCPServer)


class _Ended:
    """The protocol of a connection that was refused: whatever still comes is dropped."""

    async def handle(self, event: object) -> None:
        """Do nothing."""


def _refuse_clear_text(wrapper: Any, http1: Any) -> None:
    from hypercorn.events import Closed
    from hypercorn.protocol.h11 import H2ProtocolAssumedError

    handle = wrapper.handle

    async def check_protocol(self: Any, event: Any) -> None:
        # An `Upgrade` to it is passed over, as any that a server does not know: RFC 9110, 7.8.
        if event.method == b"PRI" and event.target == b"*" and event.http_version == b"2.0":
            raise H2ProtocolAssumedError(b"")

    async def handle_or_refuse(self: Any, event: Any) -> None:
        protocol = self.protocol
        try:
            await protocol.handle(event)
        except H2ProtocolAssumedError:
            self.protocol = _Ended()
            await protocol._send_error_response(505)
            await self.send(Closed())

    handle_or_refuse.__wrapped__ = handle  # type: ignore[attr-defined]
    http1._check_protocol = check_protocol
    wrapper.handle = handle_or_refuse


def _bound_frames(http2: Any) -> None:
    from hypercorn.events import Closed, RawData

    handle = http2.handle

    async def handle_within_bounds(self: Any, event: Any) -> None:
        if not isinstance(event, RawData):
            await handle(self, event)
            return
        if self.closed:
            return
        budget = self.__dict__.setdefault("_slipstream_budget", FrameBudget())
        if not budget.take(event.data):
            await self.send(RawData(_GO_AWAY))
            await end(self)
            return
        try:
            await handle(self, event)
        # What its frames lead to is this connection's affair, and one line in the log.
        except Exception as error:
            # Its text may quote the client's headers.
            logger.warning("an HTTP/2 connection failed: %s", type(error).__name__)
            await end(self)

    async def end(self: Any) -> None:
        await handle(self, Closed())
        await self.send(Closed())

    async def pass_over(self: Any, event: object) -> None:
        # Priorities are deprecated (RFC 9113, section 5.3), and their tree has room for some only.
        return

    handle_within_bounds.__wrapped__ = handle  # type: ignore[attr-defined]
    http2.handle = handle_within_bounds
    http2._priority_updated = pass_over


def _close_quietly(server: Any) -> None:
    close = server._close

    async def close_whatever_comes(self: Any) -> None:
        # Of TLS too: a client that sends on when it was told the end makes an error of it, whose
        # traceback has fifty lines.
        with contextlib.suppress(OSError):
            await close(self)

    server._close = close_whatever_comes
