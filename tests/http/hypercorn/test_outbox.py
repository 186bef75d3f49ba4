"""A step's chunks leave in one call, and no connection notices who has sent them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from src.http.hypercorn.outbox import MIN_CHUNKS, Outbox, SendAll
from src.http.hypercorn.outbox import Connection as OutboxConnection
from src.ops.build.kernels import ensure_built, kernel_library
from tests.http.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


def compiled() -> SendAll:
    ensure_built(wait=True)
    library = kernel_library()
    assert library is not None
    return library.send


class Gate:
    """Sends when it is opened, and keeps what it was asked for."""

    def __init__(self, send_all: SendAll) -> None:
        self.open = threading.Event()
        self.calls: list[list[int]] = []
        self._send_all = send_all

    def __call__(self, sockets: Sequence[int], data: Sequence[bytes]) -> list[int]:
        self.calls.append(list(sockets))
        assert self.open.wait(20)
        return self._send_all(sockets, data)


class Connection:
    """The server's transport, and a client that reads all there is."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, transport: Any
    ) -> None:
        self._reader, self._writer = reader, writer
        self.transport = transport

    async def rest(self) -> bytes:
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := await self._reader.read(100_000):
                received += data
        return received

    def leave(self) -> None:
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def connections(count: int) -> AsyncIterator[list[Connection]]:
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accepted.put(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found = []
    for _ in range(count):
        # Little room, so that a socket takes a part.
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=client)
        found.append(Connection(reader, writer, (await accepted.get()).transport))
    try:
        yield found
    finally:
        server.close()
        for each in found:
            each.leave()
            each.transport.abort()
        await server.wait_closed()
        await asyncio.sleep(0.01)


async def settle(sender: OutboxConnection) -> None:
    async with sender.held():
        pass


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_every_byte_arrives_in_order_whoever_sends_it() -> None:
    gate = Gate(compiled())
    gate.open.set()
    outbox = Outbox(lambda: gate)
    draw = random.Random(7)
    async with connections(20) as all_of_them:
        before = descriptors()
        senders = [OutboxConnection(outbox, each.transport) for each in all_of_them]
        sent = [b""] * len(senders)
        readers: list[asyncio.Task[bytes]] = []
        for turn in range(60):
            for number, sender in enumerate(senders):
                for _ in range(draw.randint(0, 2)):
                    chunk = draw.randbytes(draw.choice([1, 20, 200, 30_000 if turn < 20 else 5]))
                    sender.write(chunk)
                    sent[number] += chunk
                if draw.random() < 0.1:
                    await settle(sender)
                    assert sender.pending == 0
                    all_of_them[number].transport.write(b"ordinary")
                    sent[number] += b"ordinary"
            # Nobody reads at first, so that sockets are full.
            if turn == 30:
                readers += [asyncio.create_task(each.rest()) for each in all_of_them]
            await asyncio.sleep(0.002)
        for sender, each in zip(senders, all_of_them, strict=True):
            await settle(sender)
            sender.close()
            each.transport.close()
        assert descriptors() <= before
        assert [await each for each in readers] == sent
    # A busy machine has the thread take more at once.
    assert len(gate.calls) > 5
    outbox.close()


async def test_a_few_chunks_go_to_the_transport() -> None:
    gate = Gate(compiled())
    outbox = Outbox(lambda: gate)
    async with connections(MIN_CHUNKS - 1) as few:
        for each in few:
            OutboxConnection(outbox, each.transport).write(b"x")
        await asyncio.sleep(0.01)
        for each in few:
            each.transport.close()
            assert await each.rest() == b"x"
    assert gate.calls == []


async def test_without_compiled_code_transports_send() -> None:
    outbox = Outbox(lambda: None)
    async with connections(MIN_CHUNKS) as enough:
        for each in enough:
            OutboxConnection(outbox, each.transport).write(b"x")
        await asyncio.sleep(0.01)
        for each in enough:
            each.transport.close()
            assert await each.rest() == b"x"


async def test_what_is_written_meanwhile_comes_after() -> None:
    gate = Gate(compiled())
    outbox = Outbox(lambda: gate)
    async with connections(MIN_CHUNKS) as enough:
        senders = [OutboxConnection(outbox, each.transport) for each in enough]
        for round_ in (b"1", b"2", b"3"):
            for sender in senders:
                sender.write(round_)
            await asyncio.sleep(0.01)
        assert [sender.pending for sender in senders] == [3] * MIN_CHUNKS
        settled = asyncio.gather(*(settle(sender) for sender in senders))
        await asyncio.sleep(0.01)
        assert not settled.done()
        gate.open.set()
        await settled
        for sender, each in zip(senders, enough, strict=True):
            sender.close()
            each.transport.close()
            assert await each.rest() == b"123"
    outbox.close()


async def test_nothing_goes_to_whoever_got_the_number_of_a_closed_connection() -> None:
    gate = Gate(compiled())
    outbox = Outbox(lambda: gate)
    async with connections(MIN_CHUNKS) as enough:
        before = descriptors()
        senders = [OutboxConnection(outbox, each.transport) for each in enough]
        old = {each.transport.get_extra_info("socket").fileno() for each in enough}
        for sender in senders:
            sender.write(b"secret")
        while not gate.calls:
            await asyncio.sleep(0.001)
        assert not old & set(gate.calls[0])
        for sender, each in zip(senders, enough, strict=True):
            sender.close()
            each.transport.abort()
        await asyncio.sleep(0.01)
        async with connections(MIN_CHUNKS) as others:
            new = {each.transport.get_extra_info("socket").fileno() for each in others}
            # The system gives the lowest number that is free.
            assert new & old
            assert not new & set(gate.calls[0])
            gate.open.set()
            await asyncio.sleep(0.05)
            for each in others:
                each.transport.close()
                assert await each.rest() == b""
        await until(lambda: descriptors() < before)
    outbox.close()


async def test_one_that_left_disturbs_nobody() -> None:
    gate = Gate(compiled())
    outbox = Outbox(lambda: gate)
    async with connections(MIN_CHUNKS + 1) as enough:
        senders = [OutboxConnection(outbox, each.transport) for each in enough]
        for number in range(3):
            for sender in senders:
                sender.write(b"%d" % number)
            if number == 0:
                while not gate.calls:
                    await asyncio.sleep(0.001)
                enough[0].leave()
                await asyncio.sleep(0.01)
                gate.open.set()
            await asyncio.sleep(0.02)
        assert enough[0].transport.is_closing()
        for sender, each in zip(senders, enough, strict=True):
            await settle(sender)
            sender.close()
            each.transport.close()
        for each in enough[1:]:
            assert await each.rest() == b"012"
    outbox.close()


async def test_the_thread_stays_away_while_others_write() -> None:
    gate = Gate(compiled())
    gate.open.set()
    outbox = Outbox(lambda: gate)
    async with connections(MIN_CHUNKS) as enough:
        senders = [OutboxConnection(outbox, each.transport) for each in enough]
        async with senders[0].held():
            for sender in senders:
                sender.write(b"1")
            await until(lambda: len(gate.calls) == 1)
            enough[0].transport.write(b"2")
        assert len(gate.calls[0]) == MIN_CHUNKS - 1
        for sender in senders:
            sender.write(b"3")
        await until(lambda: len(gate.calls) == 2)
        # It is back.
        assert len(gate.calls[1]) == MIN_CHUNKS
        for number, (sender, each) in enumerate(zip(senders, enough, strict=True)):
            sender.close()
            each.transport.close()
            assert await each.rest() == (b"13" if number else b"123")
    outbox.close()


async def test_after_the_end_transports_send() -> None:
    gate = Gate(compiled())
    outbox = Outbox(lambda: gate)
    outbox.close()
    async with connections(MIN_CHUNKS) as enough:
        for each in enough:
            OutboxConnection(outbox, each.transport).write(b"x")
        await asyncio.sleep(0.01)
        for each in enough:
            each.transport.close()
            assert await each.rest() == b"x"
    assert gate.calls == []


@pytest.mark.parametrize(
    "fault",
    ["no descriptor is left", "few descriptors are left", "there is no thread", "the call fails"],
)
async def test_where_it_cannot_be_done_the_transport_does_it(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def send_all(sockets: Sequence[int], data: Sequence[bytes]) -> list[int]:
        nonlocal calls
        calls += 1
        raise ValueError

    def dup(number: int) -> int:
        raise OSError(24, "Too many open files")

    def submit(self: ThreadPoolExecutor, *work: object) -> None:
        raise RuntimeError("can't start new thread")

    if fault == "no descriptor is left":
        monkeypatch.setattr(os, "dup", dup)
    elif fault == "few descriptors are left":
        monkeypatch.setattr("src.http.hypercorn.outbox._max_descriptor", lambda: 0)
    elif fault == "there is no thread":
        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    outbox = Outbox(lambda: send_all)
    async with connections(MIN_CHUNKS) as enough:
        before = descriptors()
        senders = [OutboxConnection(outbox, each.transport) for each in enough]
        for sender in senders:
            sender.write(b"x")
        await asyncio.sleep(0.05)
        for sender, each in zip(senders, enough, strict=True):
            await settle(sender)
            sender.close()
            each.transport.close()
            assert await each.rest() == b"x"
        assert descriptors() < before
    assert calls == (fault == "the call fails")
    outbox.close()


def test_the_call_tells_of_each_socket_what_it_took() -> None:
    send_all = compiled()
    good, full, gone = (socket.socketpair() for _ in range(3))
    gone[1].close()
    full[0].setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            full[0].send(b"x" * 4096)
    big = b"y" * 10_000_000
    partly = socket.socketpair()
    numbers = [pair[0].fileno() for pair in (good, full, gone, partly)]
    took = send_all([*numbers, 10**6], [b"abc", b"d", b"e", big, b"f"])
    assert took[0] == 3
    assert good[1].recv(10) == b"abc"
    assert took[1] in (-11, -35)  # EAGAIN of Linux and of others
    assert took[2] == -32  # EPIPE, and no signal
    assert 0 < took[3] < len(big)
    assert took[4] == -9  # EBADF
    assert send_all([], []) == []
    for pair in (good, full, gone, partly):
        for each in pair:
            each.close()
