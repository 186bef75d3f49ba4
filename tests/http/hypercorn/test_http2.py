"""HTTP/2 without TLS is refused; with it, what a connection may ask for is bounded."""

from __future__ import annotations

import random
import socket

import pytest

from src.http.hypercorn import http2
from src.http.hypercorn.http2 import OTHERS, READ_MARKS, RESETS, Allowance, FrameBudget
from tests.http.processes import ServerProcess

pytestmark = pytest.mark.timeout(120)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, PRIORITY, RESET, SETTINGS, PING, READ_MARK = 1, 2, 3, 4, 6, 8


def frame(kind: int, payload: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        (RESET, RESETS),
        (READ_MARK, READ_MARKS),
        (SETTINGS, OTHERS),
        (PRIORITY, OTHERS),
        (PING, OTHERS),
        (0, OTHERS),
        (7, OTHERS),
        (200, OTHERS),
    ],
)
def test_frames_are_counted_however_they_come(kind: int, rate: tuple[int, int]) -> None:
    most, refill = rate
    source = random.Random(kind)
    for seed in range(3):
        clock = Clock()
        budget = FrameBudget(clock)
        payload = b"" if kind == 0 else bytes(source.randrange(20))
        data = PREFACE + frame(kind, payload) * most
        while data:
            cut = source.randint(1, 200 if seed else len(data))
            assert budget.take(data[:cut])
            data = data[cut:]
        clock.now += 1.0
        assert budget.take(frame(kind, payload) * refill)
        assert not budget.take(frame(kind, payload))


def test_what_requests_are_made_of_is_bounded_elsewhere() -> None:
    budget = FrameBudget(Clock())
    assert budget.take(PREFACE + (frame(HEADERS, b"x" * 20) + frame(0, b"body")) * 10_000)


def test_a_payload_is_not_taken_for_frames() -> None:
    budget = FrameBudget(Clock())
    resets = frame(RESET, bytes(4)) * 1000
    assert budget.take(PREFACE + frame(0, resets))
    assert not budget.take(resets)


def test_an_allowance_is_never_more_than_at_first() -> None:
    clock = Clock()
    allowance = Allowance((5, 10), clock)
    clock.now = 100.0
    assert allowance.take(5)
    assert not allowance.take(1)


def test_every_frame_that_is_named_is_one_of_the_protocol() -> None:
    import hyperframe.frame as frames

    assert frames.DataFrame.type == http2._DATA
    assert frames.HeadersFrame.type == http2._HEADERS
    assert frames.RstStreamFrame.type == http2._RST_STREAM
    assert frames.WindowUpdateFrame.type == http2._WINDOW_UPDATE
    assert frames.ContinuationFrame.type == http2._CONTINUATION
    last = frames.GoAwayFrame(0, error_code=11)
    assert last.serialize() == http2._GO_AWAY


def answer_to(server: ServerProcess, request: bytes) -> bytes:
    """Everything until the server ends the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
    return answer


def test_prior_knowledge_in_clear_text_is_refused(hypercorn: ServerProcess) -> None:
    answer = answer_to(hypercorn, PREFACE + frame(SETTINGS) * 200 + frame(PING, bytes(8)))
    assert answer.startswith(b"HTTP/1.1 505 ")
    assert b"connection: close" in answer.lower()
    assert hypercorn.get("/live").status_code == 200


def test_an_upgrade_in_clear_text_is_passed_over(hypercorn: ServerProcess) -> None:
    answer = answer_to(
        hypercorn,
        b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 101" not in answer


def test_a_body_with_two_lengths_ends_the_connection(hypercorn: ServerProcess) -> None:
    smuggled = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = answer_to(
        hypercorn,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled,
    )
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1 ") == 1
