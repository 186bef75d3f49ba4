"""One HTTP request and its answer, and the ASGI application around a handler of one.

Every handler runs beside a task that waits for the client to go away: hypercorn tells it to nobody
else. The handler is then cancelled, which aborts whatever it has in the engine.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final, TypeAlias

import anyio
from starlette.types import Message, Receive, Scope, Send

from src.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    RequestTooLargeError,
    UnavailableError,
)
from src.engine.client import AsyncEngine
from src.engine.requests.admissions import Admission
from src.http.hypercorn.direct import DirectWriter, abort_connection, direct_writer
from src.http.server.body import (
    ClientDisconnectedError,
    check_content_type,
    check_fields,
    check_structure,
    declares_body,
    discard_body,
    header,
    read_body,
)
from src.http.server.codings import body_codings, decoded_body
from src.http.server.error_format import error_format
from src.http.server.errors import ErrorAnswer, answer_to
from src.http.server.keys import TENANT
from src.http.server.line_breaks import unbroken
from src.http.server.state import Server
from src.http.server.tracing import begin_trace, end_trace
from src.observability.tracing import RequestTrace

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]

JSON_TYPE: Final = b"application/json"
STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
TIMEOUT_HEADER: Final = b"x-request-timeout"
PIECE: Final = 256 * 1024
"""Bytes of a whole answer that a reader takes within `http.write_timeout`, or is given up."""
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Call:
    """A request with its body, and the means to answer it once: whole, or as a stream."""

    def __init__(self, server: Server, scope: Scope, send: Send) -> None:
        self.server = server
        self.scope = scope
        # Until it is decoded.
        self.body = b""
        self.body_size = 0
        self.started = False
        self.finished = False
        self.disconnected = False
        # Whether the answer should have begun by now.
        self.overdue = False
        self.received = time.monotonic()
        self.status: int | None = None
        self.trace: RequestTrace | None = None
        self.admission: Admission | None = None
        self._send = send
        # For the next events of a stream, whenever it is ready: most of them go no other way.
        self.direct: DirectWriter | None = None
        # How errors are encoded; an endpoint may put another one here once it streams.
        self.error_format = error_format(scope["path"].removeprefix(scope.get("root_path", "")))
        asked = header(scope, b"x-request-id")
        self.id = asked if asked and _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex

    async def admitted_engine(self) -> AsyncEngine:
        """The engine, ready, and bound to finish this request though it be told to drain meanwhile.

        Raises what `Server.ready_engine` raises.
        """
        engine = await self.server.ready_engine()
        self.admission = engine.admit()
        return engine

    @property
    def tenant(self) -> str:
        """Name of the owner of the key that let it in; empty if no owners are told apart."""
        name: str = self.scope.get(TENANT, "")
        return name

    def timeout(self, *others: float | None) -> float | None:
        """Seconds that the request may take: the least of its header and of ``others``.

        Raises
        ------
        InvalidRequestError
            The header is no number of seconds.
        """
        given = [seconds for seconds in others if seconds is not None]
        if (asked := header(self.scope, TIMEOUT_HEADER)) is not None:
            if _SECONDS.fullmatch(asked) is None or not float(asked) > 0:
                raise InvalidRequestError(
                    f"X-Request-Timeout must be a number of seconds over 0, got {asked[:50]!r}",
                    param="X-Request-Timeout",
                )
            given.append(float(asked))
        return min(given, default=None)

    async def answer(
        self, *body: bytes, status: int = 200, kind: bytes = JSON_TYPE, headers: Headers = ()
    ) -> None:
        """Send a whole answer, which may come in pieces.

        This and whatever else sends raises `ClientDisconnectedError` when the client takes nothing
        for ``http.write_timeout``; its connection is then ended.
        """
        left = sum(map(len, body))
        await self._start(
            status,
            ((b"content-type", kind), (b"content-length", str(left).encode()), *headers),
        )
        for parcel in _parcels(body):
            left -= len(parcel)
            self.finished = not left
            await self._send_body(parcel, more=bool(left))
            if left:
                # A server whose reader keeps up never suspends in `send`.
                await asyncio.sleep(0)

    async def answer_in_pieces(self, pieces: Iterable[bytes], kind: bytes = JSON_TYPE) -> None:
        """Send a whole answer whose pieces are made while its reader takes them.

        So most of it is never held. Its length is told only if it is short. Making a piece must
        not fail: its beginning may have been sent.
        """
        parcels = _parcels(pieces)
        parcel = next(parcels)
        headers = [(b"content-type", kind)]
        # All parcels are whole but the last one.
        if len(parcel) < PIECE:
            headers.append((b"content-length", str(len(parcel)).encode()))
        await self._start(200, headers)
        while len(parcel) >= PIECE:
            await self._send_body(parcel, more=True)
            # A server whose reader keeps up never suspends in `send`.
            await asyncio.sleep(0)
            parcel = next(parcels, b"")
        self.finished = True
        await self._send_body(parcel, more=False)

    async def begin(self, status: int, headers: Headers, body: bytes) -> None:
        """Send an answer but its end, so that the connection stays open for a while."""
        await self._start(status, headers)
        await self._send_body(body, more=True)

    async def write(self, events: bytes) -> None:
        """Send the next events of a stream; the first ones begin it."""
        events = unbroken(events)
        if not self.started:
            await self._start(200, STREAM_HEADERS)
            self.direct = direct_writer(self.scope, self.server.outbox)
        if self.direct is not None and self.direct.is_ready:
            self.direct.write(events)
            return
        await self._send_body(events, more=True)
        # After a disconnect `send` returns at once and for ever: without this, a producer that is
        # never out of data would keep the loop to itself and never be cancelled.
        await asyncio.sleep(0)

    async def end(self, events: bytes) -> None:
        """Send the last events of a stream."""
        if not self.started:
            await self._start(200, STREAM_HEADERS)
        self.finished = True
        if self.direct is not None:
            async with self.direct.held():
                self.close()
        await self._send_body(unbroken(events), more=False)

    def close(self) -> None:
        """Nothing more is sent; harmless when done twice."""
        if self.admission is not None:
            self.admission.release()
        direct, self.direct = self.direct, None
        if direct is not None:
            direct.close()

    async def fail(self, error: BaseException) -> None:
        """Answer with an error: by its status, or inside a stream that has begun."""
        answer = answer_to(error)
        self.server.metrics.on_rejection(answer.reason)
        if self.trace is not None:
            self.trace.failed(error)
        if self.started:
            await self.end(self.error_format.event(answer, self.id))
        else:
            await self._answer_error(answer)

    async def _answer_error(self, answer: ErrorAnswer) -> None:
        body = self.error_format.body(answer, self.id)
        await self.answer(body, status=answer.status, headers=answer.headers)

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.status = status
        own = [(b"x-request-id", self.id.encode())]
        if (trace := self.trace) is not None:
            # https://w3c.github.io/trace-context/#traceresponse-header
            value = f"00-{trace.trace_id}-{trace.span_id}-01"
            own.append((b"traceresponse", value.encode()))
        await self._send_in_time(
            {"type": "http.response.start", "status": status, "headers": [*headers, *own]}
        )

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": more}
        async with contextlib.nullcontext() if self.direct is None else self.direct.held():
            await self._send_in_time(message)

    async def _send_in_time(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self.server.config.http.write_timeout):
                await self._send(message)
        except TimeoutError:
            abort_connection(self.scope)
            raise ClientDisconnectedError from None


def _parcels(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, as many at a time as a reader is given the time for; at least once."""
    waiting: list[memoryview] = []
    size = 0
    for piece in pieces:
        rest = memoryview(piece)
        while size + len(rest) > PIECE:
            cut = PIECE - size
            parcel = b"".join((*waiting, rest[:cut]))
            waiting, size, rest = [], 0, rest[cut:]
            yield parcel
        waiting.append(rest)
        size += len(rest)
    yield b"".join(waiting)


async def refuse(
    call: Call,
    receive: Receive,
    error: BaseException,
    *,
    linger: bool = True,
    headers: Headers = (),
) -> None:
    """Answer with an error at once, though the body is still to come; then end the connection.

    Most clients send all of a body before they look for an answer, and a connection that is closed
    under them loses it. So the rest is read and dropped, within bounds, before the end is sent.
    """
    answer = answer_to(error)
    body = call.error_format.body(answer, call.id)
    call.server.metrics.on_rejection(answer.reason)
    if call.trace is not None:
        call.trace.failed(error)
    # HTTP/2 has no such header, and no connection that one request could hold up.
    unread = call.scope["http_version"].startswith("1") and declares_body(call.scope)
    head = (
        (b"content-type", JSON_TYPE),
        (b"content-length", str(len(body)).encode()),
        *answer.headers,
        *headers,
        *([(b"connection", b"close")] if unread else []),
    )

    async def drop() -> None:
        # Hypercorn's reader waits for room in a queue, and its end of the answer for the reader.
        while (await receive())["type"] != "http.disconnect":
            await anyio.lowlevel.checkpoint()

    try:
        await call.begin(answer.status, head, body)
        if linger:
            await discard_body(receive)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drop)
            await call.end(b"")
            tasks.cancel_scope.cancel()
    except* ClientDisconnectedError:
        call.server.metrics.on_disconnect()


Handler: TypeAlias = Callable[[Call], Awaitable[None]]


class EndpointApp:
    """An ASGI application that answers with ``handler``, whatever happens in it."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, run the handler until it is done or the client has gone."""
        server: Server = scope["app"].state.server
        call = Call(server, scope, send)
        call.trace = begin_trace(server.engine, scope, call.received)
        try:
            await self._serve(call, receive)
        finally:
            call.close()
            if call.trace is not None:
                end_trace(server.engine, call.trace, call.status, disconnected=call.disconnected)

    async def _serve(self, call: Call, receive: Receive) -> None:
        server, scope = call.server, call.scope
        limits = server.config.http
        try:
            # Nobody's GET has a body of meaning: what comes is dropped beside the handler.
            if scope["method"] not in ("GET", "HEAD"):
                with anyio.fail_after(limits.body_timeout):
                    call.body = await read_body(scope, receive, limits.max_body_bytes)
                    call.body_size = len(call.body)
        except ClientDisconnectedError:
            server.metrics.on_disconnect()
            return
        except TimeoutError:
            late = DeadlineExceededError(
                f"the body did not arrive within {limits.body_timeout:g} s", code="body_timeout"
            )
            await refuse(call, receive, late, linger=False)
            return
        except RequestTooLargeError as error:
            await refuse(call, receive, error)
            return
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                call.disconnected = not call.finished
                tasks.cancel_scope.cancel()

            async def expire(seconds: float) -> None:
                await anyio.sleep(seconds)
                call.overdue = not call.started
                if call.overdue:
                    tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            if limits.first_byte_timeout is not None:
                tasks.start_soon(expire, limits.first_byte_timeout)
            await self._run(call)
            tasks.cancel_scope.cancel()
        if call.overdue and not call.started and not call.disconnected:
            late_answer = UnavailableError(
                f"the answer did not begin within {limits.first_byte_timeout:g} s",
                retry_after=limits.first_byte_timeout or 1.0,
                code="first_byte_timeout",
            )
            try:
                await call.fail(late_answer)
            except ClientDisconnectedError:
                call.disconnected = True
        if call.disconnected:
            server.metrics.on_disconnect()

    async def _run(self, call: Call) -> None:
        try:
            try:
                if call.body:
                    await _make_readable(call)
                await self._handler(call)
            except ClientDisconnectedError:
                raise
            # The last line of defence: one request's fault ends with this request, and is logged.
            except Exception as error:
                await call.fail(error)
        except ClientDisconnectedError:
            call.disconnected = True


async def _make_readable(call: Call) -> None:
    """Leave a body that may be decoded as JSON, or raise why it may not be."""
    check_content_type(call.scope)
    limits = call.server.config.http
    body = await decoded_body(call.body, body_codings(call.scope), limits.max_body_bytes)
    # Some clients' writers put a mark first, which JSON may ignore (RFC 8259, section 8.1).
    call.body = body.removeprefix(codecs.BOM_UTF8)
    call.body_size = len(call.body)
    await check_structure(
        call.body, max_nodes=limits.max_json_nodes, max_values=limits.max_json_values
    )
    await check_fields(call.body)
    await call.server.turns.take(call.body_size)
