"""Bodies as clients encode them.

The reports are listed by kind in docs/clients.md, "Tried from public reports".
"""

from __future__ import annotations

import gzip
import json
import zlib

import httpx
import pytest

from tests.http.asking import ASKS_WEATHER, CHAT

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

JSON_TYPE = {"content-type": "application/json"}

# Bodies as clients encode them

BODY = json.dumps({"messages": ASKS_WEATHER, "max_tokens": 1, "temperature": 0}).encode()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("identity", BODY),
        ("gzip", gzip.compress(BODY)),
        ("x-gzip", gzip.compress(BODY[:40]) + gzip.compress(BODY[40:])),
        ("GZip", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("deflate, gzip", gzip.compress(zlib.compress(BODY))),
        (None, b"\xef\xbb\xbf" + BODY),
        (None, BODY + b"\r\n"),
    ],
)
async def test_a_body_is_read_as_it_is_coded(
    demo_client: httpx.AsyncClient, coding: str | None, body: bytes
) -> None:
    headers = JSON_TYPE if coding is None else {**JSON_TYPE, "content-encoding": coding}
    answer = await demo_client.post(CHAT, content=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("coding", ["zstd", "br", "gzip, zstd", "gzip, gzip, gzip, gzip, gzip"])
async def test_a_coding_that_is_not_read_is_refused_by_name(
    demo_client: httpx.AsyncClient, coding: str
) -> None:
    headers = {**JSON_TYPE, "content-encoding": coding}
    answer = await demo_client.post(CHAT, content=BODY, headers=headers)
    assert answer.status_code == 415
    assert "content-encoding" in answer.json()["error"]["message"]
    assert "gzip" in answer.headers["accept-encoding"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"no gzip", 400),
        (gzip.compress(BODY)[:-9], 400),
        (gzip.compress(BODY) + b"rest", 400),
        # A hundred times as long as it looks, and longer than bodies may be.
        (gzip.compress(b" " * 50_000_000), 413),
        (gzip.compress(gzip.compress(b" " * 50_000_000)), 400),
    ],
)
async def test_a_coded_body_that_is_broken_or_a_bomb_is_refused(
    demo_client: httpx.AsyncClient, body: bytes, status: int
) -> None:
    headers = {**JSON_TYPE, "content-encoding": "gzip"}
    answer = await demo_client.post(CHAT, content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
