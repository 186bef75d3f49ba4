"""Over real sockets: readers that never read, and clients that leave at any byte."""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.http.processes import ServerProcess

pytestmark = pytest.mark.timeout(240)

IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def server(environment: dict[str, str]) -> Iterator[ServerProcess]:
    with ServerProcess.hypercorn({**environment, "SLIPSTREAM_HTTP__WRITE_TIMEOUT": "2"}) as process:
        process.wait_ready()
        yield process


def gauge(server: ServerProcess, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])


def wait_idle(server: ServerProcess, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while any(gauge(server, name) for name in IDLE):
        assert time.monotonic() < deadline, "the engine is not idle"
        time.sleep(0.05)


def request(**fields: object) -> bytes:
    body = json.dumps({"prompt": "hello", "ignore_eos": True, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def memory(server: ServerProcess) -> int:
    """Resident bytes of the server's processes."""
    total = 0
    with open(f"/proc/{server.process.pid}/task/{server.process.pid}/children") as children:
        pids = [str(server.process.pid), *children.read().split()]
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("VmRSS"):
                    total += int(line.split()[1]) * 1024
    return total


class Steady(threading.Thread):
    """A client that reads one stream as it comes, and its longest wait for the next piece."""

    def __init__(self, server: ServerProcess, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._server, self._max_tokens = server, max_tokens
        self.longest = 0.0
        self.text = ""
        self.start()

    def run(self) -> None:
        body = {"prompt": "x", "ignore_eos": True, "stream": True, "max_tokens": self._max_tokens}
        url = f"{self._server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            last = time.monotonic()
            for piece in answer.iter_text():
                now = time.monotonic()
                self.longest, last = max(self.longest, now - last), now
                self.text += piece


def test_a_reader_that_never_reads_is_given_up_and_hurts_nobody(server: ServerProcess) -> None:
    before = gauge(server, "slipstream_client_disconnects_total")
    resident = memory(server)
    deaf: list[socket.socket] = []
    longest: list[float] = []
    # Nobody waits for those that do not read; a busy machine has its own pauses, now and then.
    while min(longest, default=2.0) >= 2.0 and len(longest) < 3:
        for _ in range(2):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(request(stream=True, n=16, max_tokens=900, logprobs=20))
            deaf.append(client)
        steady = Steady(server, 500)
        steady.join(120)
        assert steady.text.endswith("data: [DONE]\n\n")
        longest.append(steady.longest)
    assert min(longest) < 2.0, longest
    wait_idle(server, 90)
    deadline = time.monotonic() + 60
    while gauge(server, "slipstream_client_disconnects_total") < before + len(deaf):
        assert time.monotonic() < deadline, "they were never given up"
        time.sleep(0.1)
    # About 30 MB were generated for them: what was not taken is gone, or never was text.
    assert memory(server) - resident < 200 * 2**20
    for client in deaf:
        # The connection is at its end, after what the kernel has already taken.
        client.settimeout(20)
        with contextlib.suppress(ConnectionError):
            while client.recv(2**20):
                pass
        client.close()
    assert "Traceback" not in server.output


def test_a_whole_answer_that_nobody_reads_is_given_up(server: ServerProcess) -> None:
    before = gauge(server, "slipstream_client_disconnects_total")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(request(n=16, max_tokens=900, logprobs=20))
        deadline = time.monotonic() + 120
        while gauge(server, "slipstream_client_disconnects_total") < before + 1:
            assert time.monotonic() < deadline, "it was never given up"
            time.sleep(0.1)
        # The connection is at its end, and the answer is not whole.
        client.settimeout(20)
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := client.recv(2**20):
                received += data
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    assert len(body) < int(length.partition(b":")[2])
    wait_idle(server)
    assert "Traceback" not in server.output


def test_a_whole_answer_is_whole_for_a_slow_reader(server: ServerProcess) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.connect(("127.0.0.1", server.port))
        client.settimeout(60)
        client.sendall(request(n=16, max_tokens=900, logprobs=20))
        received = bytearray(client.recv(65536))
        head, _, _ = bytes(received).partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        length = int(next(x for x in lines if x.startswith(b"content-length:")).partition(b":")[2])
        began = time.monotonic()
        while len(received) < len(head) + 4 + length:
            received += client.recv(65536)
            time.sleep(0.02)
    # All of it took longer than any piece may.
    assert time.monotonic() - began > 2.0
    assert len(json.loads(received[len(head) + 4 :])["choices"]) == 16


def test_clients_that_leave_at_any_byte_of_their_request(server: ServerProcess) -> None:
    whole = request(stream=True, max_tokens=1000)
    rng = random.Random(3)
    cuts = {1, 5, 16, len(whole) - 1, *(rng.randrange(1, len(whole)) for _ in range(40))}
    for cut in cuts:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(whole[:cut])
            if cut % 3 == 0:
                # With a reset, not with an orderly end.
                linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    wait_idle(server)
    assert server.get("/health").status_code == 200
    assert "Traceback" not in server.output


def test_clients_that_leave_at_any_byte_of_their_answer(server: ServerProcess) -> None:
    whole = request(stream=True, max_tokens=1000)
    rng = random.Random(4)
    for cut in (1, 9, 15, *(rng.randrange(1, 6000) for _ in range(30))):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(whole)
            left = cut
            while left > 0:
                left -= len(client.recv(left))
            if cut % 2:
                linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        # One step later it has nothing left: the next one is alone.
        wait_idle(server)
    assert "Traceback" not in server.output


def answer_while_sending(server: ServerProcess, head: bytes) -> bytes:
    """What the server says before the whole head was sent, or once it was.

    Nothing is sent to a server that has answered: it may have closed, and what comes then resets
    the connection, its answer included.
    """
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        for begin in range(0, len(head), 4096):
            with contextlib.suppress(ConnectionError):
                client.sendall(head[begin : begin + 4096])
            if select.select([client], [], [], 0.02)[0]:
                break
        return client.recv(65536)


def test_a_head_that_is_too_large_or_no_http_is_refused(server: ServerProcess) -> None:
    for head, status in (
        (b"GET /live HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"431"),
        (b"GET /live HTTP/1.1\r\n" + b"X: a\r\n" * 50_000 + b"\r\n", b"431"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /live HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", b"400"),
        (
            b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"400",
        ),
        (b"GET /live HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50 + b"\r\n\r\n", b"400"),
    ):
        answer = answer_while_sending(server, head)
        assert answer.startswith(b"HTTP/1.1 " + status), (head[:40], answer[:100])
    assert server.get("/live").status_code == 200
