"""Long bodies and compressed ones, many at once: they wait for one another, and nobody for them."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import threading
import time
import zlib

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from src.core.errors import InvalidRequestError, RequestTooLargeError
from src.core.turn_pool import TurnPool
from src.http.server import body_work
from src.http.server.body import MAX_FIELDS, check_fields
from src.http.server.body_work import ANY_SIZE, OWNER, PIECE_BYTES, Turns, beside_the_loop, in_turn
from src.http.server.codings import _decoded, decoded_body
from tests.http.server.heartbeat import bound_on_turns, held_up
from tests.http.server.test_body import MOST

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SHORT, LONG = PIECE_BYTES + 1, ANY_SIZE
ASKING = b'{"prompt":"x","max_tokens":1'


def padded(filling: bytes, tail: bytes = b"}") -> bytes:
    return ASKING + filling * ((MOST - len(ASKING) - len(tail)) // len(filling)) + tail


# Each is some kilobytes long when it is sent, and takes tens of milliseconds.
COSTLY = {
    "spaces": padded(b" "),
    "lines": padded(b"\r\n"),
    "spaces alone": b" " * MOST,
    "numbers": b'{"max_tokens":1,"prompt":[' + b"1,    " * 500_000 + b"1]}",
    "objects": ASKING + b',"y":[' + b"{}," * 60_000 + b"{}]}",
    "fields": ASKING + b"".join(b',"k%d":1' % number for number in range(60_000)) + b"}",
    "backslashes": ASKING + b',"user":"' + b"\\\\" * 4_000_000 + b'"}',
    "brackets": b"[" * MOST,
}


@pytest.mark.parametrize("name", COSTLY)
async def test_many_compressed_bodies_do_not_hold_up_the_loop(
    client: httpx.AsyncClient, app: Starlette, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = app.state.server
    http = msgspec.structs.replace(server.config.http, max_body_bytes=MOST)
    monkeypatch.setattr(server, "config", msgspec.structs.replace(server.config, http=http))
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    sent = gzip.compress(COSTLY[name])

    async def many() -> None:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", content=sent, headers=headers) for _ in range(12))
        )
        assert {answer.status_code for answer in answers} <= {200, 400, 429}

    # Twenty milliseconds at most, for the backslashes; the rest is for slower machines.
    bound = bound_on_turns(0.1)
    most = await held_up(many, bound)
    print(f"{name}: {min(most) * 1e3:.0f} of {bound * 1e3:.0f} ms")
    assert min(most) < bound, most


# One at a time


@pytest.mark.parametrize("size", [SHORT, LONG])
async def test_one_body_is_worked_on_at_a_time(size: int) -> None:
    working = most = 0
    lock = threading.Lock()

    def work(number: int) -> int:
        nonlocal working, most
        with lock:
            working += 1
            most = max(most, working)
        time.sleep(0.002)
        with lock:
            working -= 1
        return number

    done = await asyncio.gather(*(beside_the_loop(size, work, number) for number in range(20)))
    assert done == list(range(20))
    assert most == 1


async def test_longer_bodies_hold_up_themselves_alone() -> None:
    go_on = threading.Event()
    long = asyncio.create_task(beside_the_loop(LONG, go_on.wait, 30))
    # It has to begin before the other one.
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(60):
            assert await beside_the_loop(LONG - 1, lambda: "done") == "done"
        assert not long.done()
    finally:
        go_on.set()
    assert await long


@pytest.mark.parametrize("size", [SHORT, LONG])
async def test_owners_take_turns(size: int) -> None:
    go_on = threading.Event()
    order: list[str] = []

    async def work(owner: str) -> None:
        OWNER.set(owner)
        await beside_the_loop(size, order.append, owner)

    held = asyncio.create_task(beside_the_loop(size, go_on.wait, 30))
    await asyncio.sleep(0)
    owners = [*["loud"] * 50, "quiet", "quiet", "other"]
    tasks = [asyncio.create_task(work(owner)) for owner in owners]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(held, *tasks)
    assert order == ["loud", "quiet", "other", "loud", "quiet", *["loud"] * 48]


async def test_owners_take_turns_in_what_else_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_work, "_WORK", TurnPool(1, "work"))
    begun, go_on, order = threading.Event(), threading.Event(), []

    def hold() -> None:
        begun.set()
        assert go_on.wait(30)

    async def work(owner: str) -> None:
        OWNER.set(owner)
        await in_turn(order.append, owner)

    held = asyncio.create_task(in_turn(hold))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    owners = [*["loud"] * 5, "quiet"]
    tasks = [asyncio.create_task(work(owner)) for owner in owners]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(held, *tasks)
    assert order == ["loud", "quiet", *["loud"] * 4]


async def test_who_has_gone_leaves_no_work_behind() -> None:
    go_on, did = threading.Event(), []
    first = asyncio.create_task(beside_the_loop(LONG, go_on.wait, 30))
    second = asyncio.create_task(beside_the_loop(LONG, did.append, 2))
    await asyncio.sleep(0.01)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    go_on.set()
    await first
    await beside_the_loop(LONG, did.append, 3)
    assert did == [3]


async def test_others_have_a_turn_between_two_long_bodies() -> None:
    turns, happened = Turns(), []

    async def decode(size: int) -> None:
        await turns.take(size)
        happened.append("body")

    async def other() -> None:
        while happened.count("body") < 4:
            happened.append("turn")
            await asyncio.sleep(0)

    await asyncio.gather(*(decode(SHORT) for _ in range(4)), other())
    bodies = [index for index, what in enumerate(happened) if what == "body"]
    assert all("turn" in happened[a:b] for a, b in itertools.pairwise(bodies))
    # Short ones are decoded in less time than a turn takes.
    happened.clear()
    await asyncio.gather(*(decode(PIECE_BYTES) for _ in range(4)), other())
    assert happened[:4] == ["body"] * 4


# Codings


@given(
    parts=st.lists(st.binary(max_size=300), min_size=1, max_size=6),
    factor=st.sampled_from([1, 500]),
)
@settings(max_examples=60, deadline=None)
def test_members_are_joined_wherever_they_end(parts: list[bytes], factor: int) -> None:
    parts = [part * factor for part in parts]
    body = b"".join(map(gzip.compress, parts))
    whole = b"".join(parts)
    assert _decoded(body, "gzip", len(whole)) == whole
    assert _decoded(body, "gzip", len(whole) + 1) == whole
    if whole:
        with pytest.raises(RequestTooLargeError):
            _decoded(body, "gzip", len(whole) - 1)
    with pytest.raises(InvalidRequestError, match="ends too early"):
        _decoded(body[:-1], "gzip", len(whole))


def test_a_body_is_read_piece_by_piece() -> None:
    """What does not shrink is longer than a piece on both sides."""
    noise = b"".join(zlib.crc32(b"%d" % number).to_bytes(4) for number in range(300_000))
    # And what shrinks is longer than a piece once it is decoded.
    assert _decoded(gzip.compress(bytes(MOST)), "gzip", MOST) == bytes(MOST)
    for coding, body in (("gzip", gzip.compress(noise)), ("deflate", zlib.compress(noise))):
        assert len(body) > 10 * PIECE_BYTES
        assert _decoded(body, coding, MOST) == noise
        with pytest.raises(InvalidRequestError, match="ends too early"):
            _decoded(body[:-5], coding, MOST)
        with pytest.raises(InvalidRequestError, match="content-encoding says"):
            _decoded(body + b"rest", coding, MOST)


async def test_empty_members_cost_no_more_than_their_bytes() -> None:
    """What follows a member was copied at its end: eight megabytes, four hundred thousand times."""
    empty = gzip.compress(b"")
    assert await decoded_body(empty * 1024, ["gzip"], MOST) == b""
    body = empty * (MOST // len(empty))
    begun = time.perf_counter()
    with pytest.raises(InvalidRequestError, match="more than 1024 members"):
        await decoded_body(body, ["gzip"], MOST)
    assert time.perf_counter() - begun < 3


# Fields


def with_fields(count: int, filling: int = 0) -> bytes:
    """A body of so many fields, with more colons in its values than outside of them."""
    fields = {f"field {number}": {"a": [":", {"b": 1}]} for number in range(count - 1)}
    return json.dumps({**fields, "last": "{:[" * filling}).encode()


async def test_a_long_body_has_a_bounded_number_of_fields() -> None:
    filling = PIECE_BYTES
    await check_fields(with_fields(MAX_FIELDS, filling))
    with pytest.raises(InvalidRequestError, match="at most 1024 fields, got 1025") as refusal:
        await check_fields(with_fields(MAX_FIELDS + 1, filling))
    assert refusal.value.code == "too_many_values"


async def test_so_has_a_short_one(client: httpx.AsyncClient) -> None:
    for count, status in ((MAX_FIELDS, 200), (MAX_FIELDS + 1, 400)):
        unknown = {f"k{number}": 1 for number in range(count - 2)}
        answer = await client.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1, **unknown}
        )
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == "too_many_values"
