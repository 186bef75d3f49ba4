"""Chunks that go to hypercorn's transport directly are the same bytes to a client, and bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from hypercorn.asyncio.run import worker_serve
from hypercorn.config import Config
from hypercorn.utils import wrap_app

from src.http.hypercorn.direct import SERVER_SEND, DirectWriter, abort_connection, direct_writer
from src.http.hypercorn.outbox import Outbox

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

NUM_STREAMS = 16
PIECES = [b"data: x\n\n", b"y", b"z" * 70_000, "\u00e9".encode() * 1000]


@contextlib.asynccontextmanager
async def serving(app: Callable[..., Any]) -> AsyncIterator[int]:
    settings = Config()
    settings.errorlog = None
    settings.graceful_timeout = 0.5
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    settings.bind = [f"fd://{listener.detach()}"]
    stop = asyncio.Event()
    task = asyncio.create_task(
        worker_serve(
            wrap_app(app, 2**20, "asgi"),
            settings,
            sockets=settings.create_sockets(),
            shutdown_trigger=stop.wait,
        )
    )
    yield port
    stop.set()
    await task


async def lifespan(receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


async def answer_to(port: int, head: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    received = b""
    while not received.endswith((b"0\r\n\r\n", b"end\n\n")) and (data := await reader.read(65536)):
        received += data
    writer.close()
    return received


async def test_a_client_sees_no_difference() -> None:
    writers: list[DirectWriter | None] = []
    outbox = Outbox(lambda: None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await lifespan(receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope[SERVER_SEND] = send
        direct = direct_writer(scope, outbox) if scope["path"] == "/direct" else None
        writers.append(direct)
        for piece in PIECES:
            if direct is not None and direct.is_ready:
                direct.write(piece)
            else:
                async with contextlib.nullcontext() if direct is None else direct.held():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        if direct is not None:
            async with direct.held():
                direct.close()
        await send({"type": "http.response.body", "body": b"end\n\n", "more_body": False})
        return None

    async with serving(app) as port:
        found = []
        for path in (b"/direct", b"/ordinary"):
            answer = await answer_to(port, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head.lower()
            found.append(body)
        assert found[0] == found[1]
        # The supported hypercorn is the one whose insides are known.
        assert isinstance(writers[0], DirectWriter)
        # HTTP/1.0 has no chunks, and a HEAD no body.
        old = await answer_to(port, b"GET /direct HTTP/1.0\r\nHost: x\r\n\r\n")
        assert old.endswith(b"".join(PIECES) + b"end\n\n")
        assert writers[2] is None


async def test_many_streams_at_once_arrive_whole() -> None:
    sent = [0]
    everybody = asyncio.Barrier(NUM_STREAMS)

    def send_all(sockets: Sequence[int], data: Sequence[bytes]) -> list[int]:
        sent[0] += 1
        return [os.write(number, each) for number, each in zip(sockets, data, strict=True)]

    outbox = Outbox(lambda: send_all)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await lifespan(receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope[SERVER_SEND] = send
        direct = direct_writer(scope, outbox)
        assert direct is not None
        name = scope["path"].encode()
        for number in range(50):
            # As a step does: all of them in one turn of the loop.
            await everybody.wait()
            direct.write(b"%b %d\n" % (name, number))
            await asyncio.sleep(0.001)
        async with direct.held():
            direct.close()
        await send({"type": "http.response.body", "body": b"end\n\n", "more_body": False})
        return None

    async with serving(app) as port:
        heads = [b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % n for n in range(NUM_STREAMS)]
        answers = await asyncio.gather(*(answer_to(port, head) for head in heads))
    for number, answer in enumerate(answers):
        chunks = [b"%d\n" % each for each in range(50)]
        body = b"".join(b"/%d " % number + each for each in chunks) + b"end\n\n"
        assert without_framing(answer) == body
    assert sent[0] > 1
    outbox.close()


def without_framing(answer: bytes) -> bytes:
    """The body of a chunked answer."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


async def test_what_waits_for_a_reader_is_bounded() -> None:
    written = asyncio.get_running_loop().create_future()
    release = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await lifespan(receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope[SERVER_SEND] = send
        direct = direct_writer(scope, Outbox(lambda: None))
        assert direct is not None
        count = 0
        while direct.is_ready:
            direct.write(b"x" * 10_000)
            count += 1
            # The outbox has its turn.
            await asyncio.sleep(0)
        written.set_result((count, direct.waiting))
        await release.wait()
        abort_connection(scope)
        return None

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        count, waiting = await asyncio.wait_for(written, 20)
        # The kernel's buffers, and little more.
        assert count * 10_000 < 64 * 2**20
        assert waiting < 64 * 1024 + 20_000
        release.set()
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        writer.close()


@pytest.mark.parametrize(
    "scope",
    [
        {"http_version": "1.1", "method": "POST"},
        {"http_version": "1.1", "method": "POST", SERVER_SEND: print},
        {"http_version": "1.1", "method": "POST", SERVER_SEND: [].append},
        {"http_version": "2", "method": "POST", SERVER_SEND: [].append},
    ],
)
def test_other_servers_have_no_such_way(scope: dict[str, Any]) -> None:
    assert direct_writer(scope, Outbox(lambda: None)) is None
