"""One request's trace: what is in it, whose child it is, and that its times add up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from starlette.applications import Starlette

from src import SamplingParams
from src.core.outputs import FinishReason
from src.engine.client import AsyncEngine
from src.engine.execution.step_computer import StepComputer
from tests.observability.conftest import Spans

pytestmark = pytest.mark.anyio

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "a b c d e f g h i j k l m n o p q r s t"}],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
}


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def value(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes[name]


def trace_id(span: ReadableSpan) -> str:
    identity = span.get_span_context()
    assert identity is not None
    return f"{identity.trace_id:032x}"


async def test_a_chat_has_one_server_span_with_all_of_its_phases(
    client: httpx.AsyncClient, spans: Spans
) -> None:
    response = await client.post(
        "/v1/chat/completions",
        json={**CHAT, "seed": 5, "stop": ["zzz"], "top_k": 4},
        headers={
            "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01",
            "tracestate": "vendor=1",
            "x-session-id": "conversation-7",
        },
    )
    assert response.status_code == 200
    body = response.json()
    root = spans.root("chat tiny")
    assert root.kind is SpanKind.SERVER
    assert trace_id(root) == TRACE_ID
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    identity = root.get_span_context()
    assert identity is not None
    assert identity.trace_state.get("vendor") == "1"
    assert response.headers["traceresponse"] == f"00-{TRACE_ID}-{identity.span_id:016x}-01"

    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "slipstream",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_k": 4.0,
        "gen_ai.request.seed": 5,
        "gen_ai.request.stop_sequences": ("zzz",),
        "gen_ai.request.stream": False,
        "gen_ai.response.id": body["id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": body["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.conversation.id": "conversation-7",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
    }
    assert {name: value(root, name) for name in expected} == expected
    assert root.status.status_code is StatusCode.UNSET

    names = [span.name for span in spans.children(root)]
    chunks = names.count("prefill")
    prefilled = [span for span in spans.children(root) if span.name == "prefill"]
    # Chunks of 32 tokens at most.
    assert chunks >= 2
    assert (
        sum(int(str(value(span, "slipstream.prefill.tokens"))) for span in prefilled)
        == (body["usage"]["prompt_tokens"])
    )
    assert sorted(names) == sorted(
        ["parse and tokenize", "admission", "queue", "decode", "detokenize and stream"]
        + ["prefill"] * chunks
    )


async def test_a_grammar_has_a_span_before_admission(
    client: httpx.AsyncClient, spans: Spans
) -> None:
    fields = {"structured_outputs": {"choice": ["yes", "no"]}}
    response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    children = {span.name: span for span in spans.children(spans.root("chat tiny"))}
    asked, compiled = times(children["grammar compile"])
    assert times(children["parse and tokenize"])[1] <= asked < compiled
    assert times(children["admission"])[0] == compiled


async def test_times_are_nested_ordered_and_add_up(client: httpx.AsyncClient, spans: Spans) -> None:
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 200
    root = spans.root("chat tiny")
    start, end = times(root)
    children = {span.name: span for span in spans.children(root)}
    for span in spans.children(root):
        assert start <= times(span)[0] <= times(span)[1] <= end
    order = ["parse and tokenize", "admission", "queue", "decode"]
    for before, after in itertools.pairwise(order):
        # One nanosecond of rounding.
        assert times(children[before])[1] <= times(children[after])[0] + 1000
    chunks = [times(span) for span in spans.children(root) if span.name == "prefill"]
    assert times(children["queue"])[1] <= chunks[0][0] + 1000
    assert all(a[1] <= b[0] + 1000 for a, b in itertools.pairwise(chunks))
    assert chunks[-1][1] <= times(children["decode"])[0] + 1000
    assert times(children["parse and tokenize"])[0] == start
    assert times(children["parse and tokenize"])[1] == times(children["admission"])[0]
    assert times(children["admission"])[1] == times(children["queue"])[0]
    assert times(children["decode"])[0] == times(children["detokenize and stream"])[0]
    assert times(children["detokenize and stream"])[1] == end

    seconds = {
        name: float(str(value(root, f"gen_ai.latency.{name}")))
        for name in (
            *("time_in_queue", "time_in_model_prefill", "time_in_model_decode"),
            *("time_in_model_inference", "time_to_first_token", "e2e"),
        )
    }
    parts = seconds["time_in_model_prefill"] + seconds["time_in_model_decode"]
    assert parts == pytest.approx(seconds["time_in_model_inference"])
    assert seconds["e2e"] == pytest.approx((end - start) / 1e9, abs=1e-6)
    first = (times(children["decode"])[0] - start) / 1e9
    assert seconds["time_to_first_token"] == pytest.approx(first, abs=1e-6)
    queue = times(children["queue"])
    assert seconds["time_in_queue"] == pytest.approx((queue[1] - queue[0]) / 1e9, abs=1e-6)


async def test_content_is_cut_at_the_configured_length(
    client: httpx.AsyncClient, spans: Spans
) -> None:
    response = await client.post("/v1/chat/completions", json=CHAT)
    root = spans.root("chat tiny")
    asked = json.loads(str(value(root, "gen_ai.input.messages")))
    text = str(CHAT["messages"][0]["content"])  # type: ignore[index]
    assert asked == [{"role": "user", "parts": [{"type": "text", "content": text[:20]}]}]
    answered = json.loads(str(value(root, "gen_ai.output.messages")))
    content = response.json()["choices"][0]["message"]["content"]
    assert answered[0]["parts"][0]["content"] == content[:20]
    assert answered[0]["finish_reason"] == "length"


async def test_tokens_of_the_decode_are_events_where_that_is_wanted(
    client: httpx.AsyncClient, spans: Spans
) -> None:
    await client.post("/v1/chat/completions", json=CHAT)
    root = spans.root("chat tiny")
    (decode,) = (span for span in spans.children(root) if span.name == "decode")
    names = [event.name for event in decode.events]
    assert names.count("first token") == 1
    # 8 tokens, every second delivery.
    assert names.count("tokens") == 4


async def test_several_prompts_and_completions_have_a_child_each(
    client: httpx.AsyncClient, spans: Spans
) -> None:
    body = {"prompt": ["a b c", "d e f g"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200
    root = spans.root("text_completion tiny")
    children = spans.children(root)
    completions = [span for span in children if span.name.startswith("completion ")]
    places = [
        (value(span, "slipstream.prompt"), value(span, "slipstream.completion"))
        for span in completions
    ]
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]  # type: ignore[type-var]
    for span in completions:
        names = [child.name for child in spans.children(span)]
        assert names[0] == "queue"
        assert names[-1] == "decode"
    assert value(root, "gen_ai.request.choice.count") == 2
    assert value(root, "gen_ai.usage.output_tokens") == 12
    assert value(root, "gen_ai.usage.num_sequences") == 4


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({**CHAT, "temperature": 9}, 400, "InvalidRequestError"),
        ({**CHAT, "model": "nobody"}, 404, "ModelNotFoundError"),
        ("not an object", 400, "InvalidRequestError"),
    ],
)
async def test_a_refused_request_is_an_error_with_its_exception(
    client: httpx.AsyncClient, spans: Spans, body: object, status: int, kind: str
) -> None:
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == status
    root = spans.wait(lambda span: span.name.startswith("chat"))
    assert root.status.status_code is StatusCode.ERROR
    assert value(root, "error.type") == kind
    assert value(root, "http.response.status_code") == status
    (event,) = root.events
    assert event.name == "exception"
    assert event.attributes is not None
    assert kind in str(event.attributes["exception.type"])


async def test_a_preempted_completion_says_so(client: httpx.AsyncClient, spans: Spans) -> None:
    # 24 blocks of 16 tokens: four of 128 do not fit side by side.
    body = {"max_tokens": 120, "ignore_eos": True, "temperature": 0}
    prompts = [[7 + index, *range(20, 35)] for index in range(4)]
    responses = await asyncio.gather(
        *(client.post("/v1/completions", json={**body, "prompt": each}) for each in prompts)
    )
    assert [response.status_code for response in responses] == [200] * 4

    def is_preempted(span: ReadableSpan) -> bool:
        return any(event.name == "preempted" for event in span.events)

    decode = spans.wait(is_preempted)
    assert decode.name == "decode"
    moments = {event.name: event.timestamp for event in decode.events}
    assert moments["first token"] <= moments["preempted"] < moments["resumed"]
    root = spans.wait(
        lambda span: (
            decode.parent is not None
            and span.context is not None
            and span.context.span_id == decode.parent.span_id
        )
    )
    queues = [span for span in spans.children(root) if span.name == "queue"]
    assert len(queues) >= 2
    assert times(queues[1]) == (moments["preempted"], moments["resumed"])
    again = [
        s for s in spans.children(root) if s.name == "prefill" and times(s)[0] > times(queues[1])[0]
    ]
    assert again
    assert all(value(span, "slipstream.prefill.recomputed") for span in again)


async def test_every_step_is_a_span_linked_to_what_it_served(
    client: httpx.AsyncClient, spans: Spans
) -> None:
    await client.post("/v1/chat/completions", json=CHAT)
    root = spans.root("chat tiny")
    chunk = next(span for span in spans.children(root) if span.name == "prefill")
    number = value(chunk, "slipstream.step.id")
    step = spans.wait(
        lambda span: span.name == "step" and value(span, "slipstream.step.id") == number
    )
    assert step.parent is None
    assert trace_id(step) != trace_id(root)
    assert [link.context for link in step.links] == [root.get_span_context()]
    assert times(step)[0] <= times(chunk)[0] <= times(chunk)[1] <= times(step)[1]
    assert value(step, "slipstream.step.tokens") == value(chunk, "slipstream.prefill.tokens")


async def test_an_embedded_request_is_internal(app: Starlette, spans: Spans) -> None:
    engine: AsyncEngine = await app.state.server.ready_engine()
    spans.clear()
    await engine.generate("a b c", SamplingParams(max_tokens=2))
    root = spans.root("text_completion tiny")
    assert root.kind is SpanKind.INTERNAL
    assert root.parent is None
    spans.clear()
    async with engine.submit([{"role": "user", "content": "hello"}]) as submission:
        await submission.take()
    root = spans.root("chat tiny")
    assert value(root, "gen_ai.response.finish_reasons") == ("abort",)
    assert root.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("is_late", [False, True])
async def test_who_never_got_a_row_has_waited_and_nothing_else(
    app: Starlette, spans: Spans, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: AsyncEngine = await app.state.server.ready_engine()
    compute = StepComputer.compute

    def slow(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", slow)
    # Eight have all rows, and memory enough to keep them.
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    before = engine.metrics.value("vllm:request_queue_time_seconds_count")
    async with contextlib.AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(engine.submit([5 + number, 6], params))
            for number in range(8)
        ]
        for each in running:
            await each.take()
        if is_late:
            late = await engine.generate([40] * 9, params, timeout=0.05)
            assert late.finish_reason is FinishReason.DEADLINE
        else:
            async with engine.submit([40] * 9, params):
                await asyncio.sleep(0.05)
        reasons = ("deadline",) if is_late else ("abort",)
        root = spans.wait(
            lambda span: (
                span.name == "text_completion tiny"
                and value(span, "gen_ai.usage.input_tokens") == 9
                and value(span, "gen_ai.response.finish_reasons") == reasons
            )
        )
    names = [span.name for span in spans.children(root)]
    assert names == ["parse and tokenize", "admission", "queue"]
    begin, end = times(spans.children(root)[-1])
    assert end - begin >= 40_000_000
    assert end <= times(root)[1]
    assert root.status.status_code is StatusCode.UNSET
    after = engine.metrics.value("vllm:request_queue_time_seconds_count")
    # Of the eight that got one.
    assert after - before == 8


async def test_an_unsampled_caller_is_left_alone(client: httpx.AsyncClient, spans: Spans) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
    response = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert "traceresponse" not in response.headers
    # A later request's spans are there, so the earlier one's would be.
    await client.post("/v1/completions", json={"prompt": "a b", "max_tokens": 1})
    spans.root("text_completion tiny")
    assert not [span for span in spans.all() if span.name.startswith("chat")]
    assert all(trace_id(span) != TRACE_ID for span in spans.all())


async def test_a_client_that_goes_away_is_seen(app: Starlette, spans: Spans) -> None:
    spans.clear()
    sent: list[bytes] = []
    gone = asyncio.Event()
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 300}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(b"")
        if len(sent) > 3:
            gone.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "http_version": "1.1",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "server": ("testserver", 80),
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive, send)  # type: ignore[arg-type]
    root = spans.root("chat tiny")
    assert value(root, "slipstream.client_disconnected") is True
    assert [event.name for event in root.events] == ["client disconnected"]
    assert value(root, "gen_ai.response.finish_reasons") == ("abort",)
    assert value(root, "server.port") == 80
