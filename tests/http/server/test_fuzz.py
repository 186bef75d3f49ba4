"""Whatever bytes a client sends: an answer of a known shape, and never a failure of ours."""

from __future__ import annotations

import json
import os
from typing import Any

import anyio.from_thread
import anyio.to_thread
import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from src.core.errors import InvalidRequestError
from src.engine.client import AsyncEngine
from src.http.protocol.chat import ChatRequest
from src.http.protocol.completions import CompletionRequest
from src.http.protocol.messages import MessageRequest
from src.http.protocol.responses import ResponseRequest
from src.http.server.body import decode
from src.http.server.keys import credentials
from tests.http.server.refusals import GOOD
from tests.http.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(3600)]

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "60"))
OFTEN = settings(max_examples=EXAMPLES, deadline=None)
OVER_HTTP = settings(
    OFTEN, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

TEXTS = st.text(max_size=30) | st.sampled_from(["", "\x00", "\u202e", "assistant", "text", "tiny"])
NUMBERS = (
    st.integers(-3, 200)
    | st.integers()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400])
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
REQUESTS = (CompletionRequest, ChatRequest, MessageRequest, ResponseRequest)
FIELDS = sorted({field for kind in REQUESTS for field in kind.__struct_encode_fields__})
# What would only make the answers longer.
SHORT = {"max_tokens", "max_completion_tokens", "max_output_tokens", "n", "min_tokens"}
BODIES = st.dictionaries(
    st.sampled_from([field for field in FIELDS if field not in SHORT]), VALUES, max_size=4
)


@OFTEN
@given(body=st.binary(max_size=300), kind=st.sampled_from(REQUESTS))
def test_any_bytes_are_a_request_or_refused(body: bytes, kind: Any) -> None:
    try:
        request = decode(body, msgspec.json.Decoder(kind))
    except InvalidRequestError:
        return
    assert isinstance(request, kind)


@OFTEN
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES), kind=st.sampled_from(REQUESTS))
def test_any_json_is_a_request_or_refused(fields: dict[str, Any], kind: Any) -> None:
    test_any_bytes_are_a_request_or_refused.hypothesis.inner_test(json.dumps(fields).encode(), kind)


@OFTEN
@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from([b"authorization", b"x-api-key", b"cookie"]),
            st.binary(max_size=40) | st.binary(max_size=20).map(lambda key: b"Bearer " + key),
        ),
        max_size=4,
    )
)
def test_any_headers_give_keys_or_none(headers: list[tuple[bytes, bytes]]) -> None:
    keys = credentials({"headers": headers})
    assert len(keys) <= 2
    for key in keys:
        assert key
        assert any(value.endswith(key) or key in value for _, value in headers)


@pytest.mark.parametrize("path", GOOD)
async def test_any_fields_are_answered(
    client: httpx.AsyncClient, engine: AsyncEngine, path: str
) -> None:
    """Hypothesis asks from a thread of its own, since it is not asynchronous."""
    seen: set[int] = set()

    # Some endpoints know few of the fields, so that chance alone may never ask for anything wrong.
    @OVER_HTTP
    @example(fields={"model": 5}, stream=False)
    @given(fields=BODIES, stream=st.booleans())
    def ask(fields: dict[str, Any], stream: bool) -> None:
        body = json.dumps({**GOOD[path], **fields, **({"stream": True} if stream else {})})
        headers = [("content-type", "application/json"), ("x-request-timeout", "5")]

        async def post() -> httpx.Response:
            return await client.post(path, content=body.encode(), headers=headers)

        answer = anyio.from_thread.run(post)
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400, 404, 408), (body, answer.text)
        if answer.status_code != 200:
            assert "message" in answer.json()["error"]

    await anyio.to_thread.run_sync(ask)
    # Otherwise most of what is to be tried was not reached.
    assert seen >= {200, 400}
    await until(lambda: engine.stats.num_running + engine.stats.num_waiting == 0)
    assert engine.stats.pool_is_whole
