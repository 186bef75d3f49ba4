from __future__ import annotations

import json

import pytest

from src.bench.soak.exchange import BrokenAnswer, Reply, get, parse, post
from src.bench.soak.questions import Answered, answered

BODY = b'{"choices": [{"text": "hi", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}'
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
EVENTS = [
    {"choices": [{"index": 0, "text": "h"}]},
    {"choices": [{"index": 0, "text": "i", "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 2}},
]


def stream(events: list[object]) -> bytes:
    data = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in data)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def test_a_whole_answer_is_read() -> None:
    assert parse(SIZED) == Reply(200, {"content-length": str(len(BODY))}, BODY)
    assert parse(stream(EVENTS)).events() == EVENTS


@pytest.mark.parametrize("whole", [SIZED, stream(EVENTS)])
def test_an_answer_that_is_cut_anywhere_is_broken(whole: bytes) -> None:
    # The last bytes of a chunked body are nobody's loss.
    for cut in range(len(whole) - (0 if whole is SIZED else 2)):
        with pytest.raises(BrokenAnswer):
            parse(whole[:cut])


def test_a_stream_and_a_whole_answer_say_the_same() -> None:
    wanted = Answered((("hi", "stop"),), 2)
    assert answered(parse(SIZED), stream=False) == wanted
    assert answered(parse(stream(EVENTS)), stream=True) == wanted


def test_an_error_in_a_stream_is_no_answer() -> None:
    with pytest.raises(BrokenAnswer, match="an error in a stream"):
        answered(parse(stream([EVENTS[0], {"error": {"message": "broken"}}])), stream=True)


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"choices": [{}]}', b"no json"])
def test_an_answer_of_another_form_is_broken(body: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        answered(Reply(200, {}, body), stream=False)


def test_requests_have_the_length_of_their_body() -> None:
    assert post("/a", b"xyz").endswith(b"Content-Length: 3\r\n\r\nxyz")
    assert get("/a", {"K": "v"}).startswith(b"GET /a HTTP/1.1\r\nHost: localhost\r\n")
    assert b"K: v\r\n" in get("/a", {"K": "v"})
