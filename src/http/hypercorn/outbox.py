"""A step's chunks to all streams' sockets, sent by a thread in one call.

A ``send`` takes the kernel some 20 microseconds, which is more than all else that the event loop
does for a streamed token, and with a hundred streams milliseconds of every step. So what the
streams write in one turn of the loop is collected, and a thread sends it without the interpreter
lock. asyncio stays in charge of the connections: what a socket does not take at once, and every
error, goes to its transport. Few chunks, TLS and other event loops go there directly, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import sys
from asyncio.selector_events import _SelectorSocketTransport  # type: ignore[attr-defined]
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias

logger = logging.getLogger(__name__)

# Sends to each socket; returns the bytes that it took, or an errno, negated.
SendAll: TypeAlias = Callable[[Sequence[int], Sequence[bytes]], list[int]]

# Chunks for which the thread is not woken: handing over takes as long as sending a few.
MIN_CHUNKS: Final = 8
# Sentinels for `socket`: not opened yet; cannot be used.
_NOT_YET: Final = -2
_NONE: Final = -1


class Outbox:
    """What waits to be sent on any connection of one event loop.

    Parameters
    ----------
    send_all
        Gives the function that sends, or ``None`` while there is none: then transports do.
    """

    def __init__(self, send_all: Callable[[], SendAll | None]) -> None:
        self._send_all = send_all
        self._waiting: list[Connection] = []
        self._is_scheduled = False
        self._thread: ThreadPoolExecutor | None = None
        # Whether there is no thread, and will be none.
        self._is_closed = False
        # Done when the thread has sent what it was given; one batch is under way at a time.
        self.flight: asyncio.Future[list[int]] | None = None

    def add(self, connection: Connection) -> None:
        """Something waits in this connection; it is sent at the end of this turn of the loop."""
        self._waiting.append(connection)
        if not self._is_scheduled and self.flight is None:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        """End the thread, which finishes what it was given; transports send from now on."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def _flush(self) -> None:
        self._is_scheduled = False
        waiting, self._waiting = self._waiting, []
        is_worth_it = len(waiting) >= MIN_CHUNKS and not self._is_closed
        send_all = self._send_all() if is_worth_it else None
        if send_all is None:
            _each(waiting, Connection.pass_on)
            return
        in_flight: list[Connection] = []
        _each(
            waiting,
            lambda connection: in_flight.append(connection) if connection.start_send() else None,
        )
        if not in_flight:
            return
        try:
            flight = self.flight = self._hand_over(send_all, in_flight)
        # The system gives no thread. What was handed over must not be sent by a later one.
        except RuntimeError:
            logger.warning("there is no thread to send with, so the event loop does", exc_info=True)
            self.close()
            _each(in_flight, lambda connection: connection.finish_send(0))
            return
        flight.add_done_callback(lambda flight: self._all_sent(flight, in_flight))

    def _hand_over(
        self, send_all: SendAll, in_flight: Sequence[Connection]
    ) -> asyncio.Future[list[int]]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipstream-outbox")
        return asyncio.get_running_loop().run_in_executor(
            self._thread,
            send_all,
            [connection.socket for connection in in_flight],
            [connection.in_flight for connection in in_flight],
        )

    def _all_sent(self, flight: asyncio.Future[list[int]], in_flight: Sequence[Connection]) -> None:
        self.flight = None
        # Whatever fails in the call does so before anything is sent.
        failed = flight.cancelled() or flight.exception() is not None
        sizes = iter([0] * len(in_flight) if failed else flight.result())
        _each(in_flight, lambda connection: connection.finish_send(next(sizes)))
        if self._waiting:
            self._flush()


def _each(connections: Iterable[Connection], do: Callable[[Connection], None]) -> None:
    for connection in connections:
        try:
            do(connection)
        # Whatever is wrong with one connection, the others go on.
        except Exception:
            logger.exception("a connection failed while its chunks were sent")
            connection.abort()


class Connection:
    """The way to one connection's socket for one answer, in order whoever sends.

    Parameters
    ----------
    outbox
        That of the connection's event loop.
    transport
        The connection's.
    """

    __slots__ = (
        *("_chunks", "_is_clear", "_is_closed", "_num_others", "_outbox", "_transport"),
        *("in_flight", "pending", "socket"),
    )

    def __init__(self, outbox: Outbox, transport: Any) -> None:
        self._outbox = outbox
        self._transport = transport
        self._chunks: list[bytes] = []
        self._is_closed = False
        # Whether the transport is known to have nothing waiting; it is asked where it is not.
        self._is_clear = False
        # Those who write to the transport by another way, or wait for their turn to.
        self._num_others = 0
        # What the thread has of it.
        self.in_flight = b""
        # Bytes that neither the socket nor the transport has got.
        self.pending = 0
        # A descriptor of its own: the transport may close its, and its number be another's, while
        # the thread is sending.
        self.socket = _NOT_YET if type(transport) is _SelectorSocketTransport else _NONE

    @property
    def waiting(self) -> int:
        """Bytes that the socket has not got."""
        return self.pending if self._is_clear else self.pending + self._at_transport()

    def write(self, data: bytes) -> None:
        """Send this after all that was written before; never waits."""
        if not self._chunks:
            self._outbox.add(self)
        self._chunks.append(data)
        self.pending += len(data)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Wait until the transport can be written to, and keep the thread away meanwhile."""
        self._num_others += 1
        try:
            await self._settle()
            yield
        finally:
            self._num_others -= 1
            # What they have written may still wait.
            self._is_clear = False

    async def _settle(self) -> None:
        while self.in_flight and (flight := self._outbox.flight) is not None:
            await asyncio.wait([flight])
            # It may be done and the outbox not have heard of it yet.
            await asyncio.sleep(0)
        self.pass_on()

    def pass_on(self) -> None:
        """Give what waits here to the transport."""
        if self._chunks and not self.in_flight:
            data = b"".join(self._chunks)
            self._chunks.clear()
            self.pending -= len(data)
            self._give(data)

    def start_send(self) -> bool:
        """Make what waits ready for the thread; ``False`` when the transport got it instead."""
        chunks = self._chunks
        if not chunks or self._is_closed or self._transport.is_closing():
            return False
        if self.socket == _NOT_YET:
            self.socket = self._duplicate()
        # Behind what already waits for the reader only the transport may write.
        if (
            self.socket == _NONE
            or self._num_others
            or not (self._is_clear or self._at_transport() == 0)
        ):
            self.pass_on()
            return False
        self.in_flight = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        return True

    def finish_send(self, sent: int) -> None:
        """The thread has sent this many bytes, or met an error."""
        data, self.in_flight = self.in_flight, b""
        self.pending -= len(data)
        if self._is_closed:
            self.close()
        elif sent < len(data):
            # It finds a socket that is full or broken for itself, and knows what to do.
            self._give(data[max(sent, 0) :])

    def abort(self) -> None:
        """End the connection."""
        self.close()
        self._transport.abort()

    def close(self) -> None:
        """Forget what was not sent, and give the descriptor back; harmless when done twice."""
        self._is_closed = True
        self._chunks.clear()
        if not self.in_flight and self.socket >= 0:
            os.close(self.socket)
            self.socket = _NONE

    def _at_transport(self) -> int:
        size: int = self._transport.get_write_buffer_size()
        self._is_clear = size == 0 and not self._num_others
        return size

    def _give(self, data: bytes) -> None:
        self._is_clear = False
        if not self._transport.is_closing():
            self._transport.write(data)

    def _duplicate(self) -> int:
        try:
            number = os.dup(self._transport.get_extra_info("socket").fileno())
        # No descriptors are left, or the connection has just gone.
        except OSError:
            return _NONE
        # Connections come first.
        if number >= _max_descriptor():
            os.close(number)
            return _NONE
        return number


@functools.cache
def _max_descriptor() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft * 3 // 4
