"""Connections to a server that answers with these bytes, cut as the network may cut them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from src.bench.connections import Connections, Reply, header_lines
from src.bench.errors import BenchError

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n5\r\n-more\r\n0\r\n\r\n"
)
COUNTED = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nlate"


class Scripted:
    """A server that reads a whole request and answers with the next of its answers."""

    def __init__(self, *answers: Sequence[bytes], hang_up: bool = False) -> None:
        self.answers = list(answers)
        self.hang_up = hang_up
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.num_connections = 0
        self.was_left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.hang_up:
                    break
            else:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.was_left.set()


@contextlib.asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """A server's address; its connections have ended when this ends."""
    tasks: set[asyncio.Task[Any]] = set()

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve_and_close, "127.0.0.1", 0, ssl=context) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*tasks)


def asked(
    server: Callable[[], Scripted],
    ask: Callable[[Connections, Scripted], Awaitable[Any]],
    tls: tuple[ssl.SSLContext, bool] | None = None,
) -> Any:
    async def run() -> Any:
        scripted = server()
        context, verify = tls or (None, True)
        async with listening(scripted.serve, context) as address:
            url = f"{'https' if tls else 'http'}://{address}/v1/anything?x=1"
            async with Connections.open(url, verify) as connections:
                return await asyncio.wait_for(ask(connections, scripted), 60)

    return asyncio.run(run())


async def once(connections: Connections, _: Scripted) -> Reply:
    return await connections.post(b"{}", {"x-more": "yes"})


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_an_answer_is_the_same_wherever_it_is_cut(data: st.DataObject) -> None:
    whole = b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    reply = asked(lambda: Scripted(pieces), once)
    assert (reply.status, reply.body) == (200, b"one-more")


def test_pieces_have_the_times_at_which_they_came() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(CHUNKED[:-15])
        await asyncio.sleep(0.3)
        writer.write(CHUNKED[-15:])
        writer.close()

    async def run() -> tuple[float, Reply]:
        async with (
            listening(serve) as address,
            Connections.open(f"http://{address}/") as connections,
        ):
            return time.perf_counter(), await connections.post(b"{}", {})

    begun, reply = asyncio.run(run())
    (first, one), (second, more) = reply.pieces
    assert (one, more) == (b"one", b"-more")
    assert begun < first
    # The first may be read late, on a busy machine.
    assert 0.1 < second - first < 30


def test_a_connection_is_used_again_and_the_request_is_whole() -> None:
    async def twice(connections: Connections, server: Scripted) -> Scripted:
        assert (await connections.post(b"first", {"x-more": "yes"})).body == b"one-more"
        assert (await connections.post(b"second", {})).status == 503
        return server

    server = asked(lambda: Scripted([CHUNKED], [COUNTED]), twice)
    assert server.num_connections == 1
    assert server.bodies == [b"first", b"second"]
    assert server.heads[0].startswith(b"POST /v1/anything?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nx-more: yes\r\n" in server.heads[0]


def test_requests_at_once_have_a_connection_each() -> None:
    async def many(connections: Connections, server: Scripted) -> Scripted:
        replies = await asyncio.gather(*(connections.post(b"{}", {}) for _ in range(5)))
        assert [reply.status for reply in replies] == [503] * 5
        return server

    assert asked(lambda: Scripted(*[[COUNTED]] * 5), many).num_connections == 5


def test_what_was_closed_meanwhile_is_not_used() -> None:
    async def twice(connections: Connections, server: Scripted) -> Scripted:
        await connections.post(b"{}", {})
        await server.was_left.wait()
        await asyncio.sleep(0.01)
        await connections.post(b"{}", {})
        return server

    answers = [[CHUNKED], [COUNTED]]
    assert asked(lambda: Scripted(*answers, hang_up=True), twice).num_connections == 2


def test_a_server_that_wants_to_close_is_let() -> None:
    closing = COUNTED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")

    async def twice(connections: Connections, server: Scripted) -> Scripted:
        assert (await connections.post(b"{}", {})).body == b"late"
        await connections.post(b"{}", {})
        return server

    assert asked(lambda: Scripted([closing], [closing]), twice).num_connections == 2


def test_a_body_may_end_with_its_connection() -> None:
    parts = [b"HTTP/1.0 200 OK\r\n\r\nall", b" of it"]
    assert asked(lambda: Scripted(parts, hang_up=True), once).body == b"all of it"


@pytest.mark.parametrize("cut", [0, 9, 17, 30, 45, 60, len(CHUNKED) - 3])
def test_half_an_answer_is_an_error(cut: int) -> None:
    with pytest.raises(OSError, match="hung up"):
        asked(lambda: Scripted([CHUNKED[:cut]], hang_up=True), once)


@pytest.mark.parametrize("behind", [b"junk", COUNTED, b"HTTP/1.1 200 OK\r\n"])
def test_what_comes_behind_an_answer_is_no_part_of_it_nor_of_the_next(behind: bytes) -> None:
    async def twice(connections: Connections, server: Scripted) -> Scripted:
        reply = await connections.post(b"{}", {})
        assert (reply.status, reply.body) == (200, b"one-more")
        await asyncio.sleep(0.02)
        assert reply.body == b"one-more"
        assert (await connections.post(b"{}", {})).body == b"late"
        return server

    for parts in ([CHUNKED + behind], [CHUNKED, behind]):
        assert asked(lambda parts=parts: Scripted(parts, [COUNTED]), twice).num_connections == 2


def test_a_client_that_is_closed_takes_no_half_for_an_answer() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhalf")
        await reader.read()
        writer.close()

    async def run() -> None:
        async with listening(serve) as address:
            async with Connections.open(f"http://{address}/") as connections:
                asking = asyncio.ensure_future(connections.post(b"{}", {}))
                await asyncio.sleep(0.05)
            with pytest.raises(ConnectionAbortedError):
                await asking

    asyncio.run(run())


def test_an_address_says_who_asks_and_a_header_is_sent_once() -> None:
    server = Scripted([COUNTED], [COUNTED])

    async def run() -> None:
        async with listening(server.serve) as address:
            url = f"http://me:a%20b@{address}/a path/größe?q=%41 b"
            async with Connections.open(url) as connections:
                await connections.post(b"{}", {"host": "elsewhere", "content-length": "70"})
                await connections.post(b"{}", {"authorization": "Bearer key"})

    asyncio.run(run())
    first, second = (head.decode().split("\r\n") for head in server.heads)
    assert first[0] == "POST /a%20path/gr%C3%B6%C3%9Fe?q=%41%20b HTTP/1.1"
    assert sorted(first[1:4]) == [
        f"Authorization: Basic {base64.b64encode(b'me:a b').decode()}",
        "Content-Length: 2",
        "host: elsewhere",
    ]
    assert [line for line in second if "uthorization" in line] == ["authorization: Bearer key"]


def test_an_address_without_a_port_that_there_is_is_refused() -> None:
    with pytest.raises(BenchError, match="out of range"):
        Connections("http://127.0.0.1:99999/")


def test_what_is_no_http_is_an_error() -> None:
    with pytest.raises(ValueError, match="no HTTP"):
        asked(lambda: Scripted([b"SSH-2.0-OpenSSH\r\n"]), once)


def test_a_request_that_is_given_up_hangs_up() -> None:
    async def give_up(connections: Connections, server: Scripted) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connections.post(b"{}", {})
        await asyncio.wait_for(server.was_left.wait(), 30)

    asked(lambda: Scripted([CHUNKED[:60]]), give_up)


@pytest.mark.parametrize("field", [("a b", "x"), ("a", "x\r\ny: z"), ("", "x"), ("a", "\u20ac")])
def test_a_header_that_would_be_another_is_refused(field: tuple[str, str]) -> None:
    with pytest.raises(BenchError, match="cannot be sent"):
        header_lines(dict([field]))


def test_a_certificate_is_checked_unless_it_is_not_to_be() -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    assert asked(lambda: Scripted([CHUNKED]), once, (context, False)).status == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        asked(lambda: Scripted([CHUNKED]), once, (context, True))
