"""Spans of requests for vectors: whose children they are, and what is in them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from tests.observability.conftest import Spans
from tests.observability.test_traces_http import PARENT_ID, TRACE_ID, trace_id, value

pytestmark = pytest.mark.anyio

PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.mark.parametrize(
    ("path", "fields", "operation", "task"),
    [
        ("/v1/embeddings", {}, "embeddings", "embed"),
        ("/pooling", {"task": "embed"}, "embeddings", "embed"),
        ("/pooling", {"task": "token_embed"}, "token_embed", "token_embed"),
    ],
)
async def test_a_request_for_vectors_has_one_span_that_continues_the_trace(
    client: httpx.AsyncClient,
    spans: Spans,
    path: str,
    fields: dict[str, Any],
    operation: str,
    task: str,
) -> None:
    answer = await client.post(
        path, json={"input": ["a b c", "d"], **fields}, headers={"traceparent": PARENT}
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    root = spans.root(f"{operation} tiny")
    assert root.kind is SpanKind.SERVER
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert [span for span in spans.all() if trace_id(span) == TRACE_ID] == [root]
    identity = root.get_span_context()
    assert identity is not None
    assert answer.headers["traceresponse"] == f"00-{TRACE_ID}-{identity.span_id:016x}-01"
    tokens = body["usage"]["prompt_tokens"]
    expected = {
        "gen_ai.operation.name": operation,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": body["id"],
        "gen_ai.usage.input_tokens": tokens,
        "gen_ai.usage.prompt_tokens": tokens,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "slipstream.task": task,
        "slipstream.texts": 2,
        "http.response.status_code": 200,
        "http.route": path,
    }
    assert {name: value(root, name) for name in expected} == expected
    queue, whole = (
        float(str(value(root, f"gen_ai.latency.{name}"))) for name in ("time_in_queue", "e2e")
    )
    assert 0 < queue < whole
    assert root.status.status_code is StatusCode.UNSET


async def test_a_refused_request_for_vectors_has_its_error(
    client: httpx.AsyncClient, spans: Spans
) -> None:
    for fields in ({"input": []}, {"input": ["a", ""]}):
        spans.clear()
        answer = await client.post("/v1/embeddings", json=fields)
        assert answer.status_code == 400
        root = spans.root("embeddings tiny")
        assert value(root, "error.type") == "InvalidRequestError"
        assert value(root, "http.response.status_code") == 400
        assert root.status.status_code is StatusCode.ERROR


async def test_a_caller_that_is_not_sampled_gets_no_span(
    client: httpx.AsyncClient, spans: Spans
) -> None:
    for flags, identity in (("00", "1" * 32), ("01", "2" * 32)):
        headers = {"traceparent": f"00-{identity}-{PARENT_ID}-{flags}"}
        answer = await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
        assert answer.status_code == 200
        assert ("traceresponse" in answer.headers) is (flags == "01")
    assert trace_id(spans.root("embeddings tiny")) == "2" * 32


async def test_a_post_to_the_servers_address_has_a_span_and_the_page_has_none(
    client: httpx.AsyncClient, spans: Spans
) -> None:
    headers = {"traceparent": PARENT}
    page = await client.get("/", headers=headers)
    assert "traceresponse" not in page.headers
    answer = await client.post("/", json={"inputs": "a b c"}, headers=headers)
    assert answer.status_code == 200, answer.text
    root = spans.root("embeddings tiny")
    assert "traceresponse" in answer.headers
    assert [span for span in spans.all() if trace_id(span) == TRACE_ID] == [root]
    assert value(root, "http.route") == "/"
    assert value(root, "slipstream.task") == "embed"
