"""What is sent to a server, and what its answers are taken for, whatever it sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from src.bench import target as targets
from src.bench.answers import Answer
from src.bench.codecs import ServerCodec, WordCodec
from src.bench.errors import BenchError
from src.bench.openai_client import Endpoint, EventLines, OpenAIClient
from src.bench.samples import Sample

SAMPLE = Sample(prompt="once upon", prompt_len=2, output_len=8)
DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish}])


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


USAGE = event(
    choices=[],
    usage={
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
)


def answer_to(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    sample: Sample = SAMPLE,
    **endpoint: Any,
) -> Answer:
    async def run() -> Answer:
        app = web.Application()
        app.router.add_post("/v1/anything", handler)
        async with TestServer(app) as server:
            url = str(server.make_url("/v1/anything"))
            fields = {"kind": "completions", "model": "m"} | endpoint
            async with OpenAIClient.open(Endpoint(url=url, **fields)) as client:
                return await client.ask(sample, "bench-7")

    return asyncio.run(run())


def streaming(*parts: bytes) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    return handler


def test_tokens_and_text_of_a_stream_are_counted() -> None:
    answer = answer_to(streaming(text("a"), text(""), text("b", "length"), USAGE, DONE))
    assert answer.error == ""
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (5, 9, 4)
    assert answer.text == "ab"
    assert len(answer.itl) == 2
    assert 0 < answer.ttft <= answer.latency
    assert answer.latency == pytest.approx(answer.ttft + sum(answer.itl))


def test_a_chat_begins_with_its_first_words_and_not_with_its_role() -> None:
    answer = answer_to(
        streaming(
            delta(role="assistant", content=""),
            delta(reasoning_content="hm"),
            delta(content="a"),
            delta(finish="stop"),
            USAGE,
            DONE,
        ),
        kind="chat",
    )
    assert answer.error == ""
    assert answer.text == "hma"
    assert len(answer.itl) == 1


@pytest.mark.parametrize(("count", "expected"), [(None, 2), (lambda text: 10 * len(text), 30)])
def test_a_server_that_counts_nothing_is_counted_for(
    count: Callable[[str], int] | None, expected: int
) -> None:
    answer = answer_to(streaming(text("ab"), text("c", "stop"), DONE), count_tokens=count)
    assert (answer.prompt_tokens, answer.output_tokens) == (2, expected)


def test_an_answer_of_its_end_alone_has_a_time() -> None:
    answer = answer_to(streaming(text("", "stop"), USAGE, DONE))
    assert answer.success
    assert answer.ttft == answer.latency > 0


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ((DONE,), "the stream had no tokens"),
        ((), "the stream had no tokens"),
        ((text("a"),), "the stream broke off"),
        ((text("a"), event(error={"message": "out of luck", "code": 500})), "out of luck"),
        ((b"data: {nonsense}\n\n",), "DecodeError"),
        ((event(choices="none"),), "ValidationError"),
    ],
)
def test_a_stream_that_goes_wrong_is_a_failure(parts: tuple[bytes, ...], error: str) -> None:
    answer = answer_to(streaming(*parts))
    assert error in answer.error
    assert answer.latency > 0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"error": {"message": "too long"}}', "HTTP 400: too long"),
        ('{"error": "flat"}', "HTTP 400: flat"),
        ("<html>gateway</html>", "HTTP 400: <html>gateway</html>"),
    ],
)
def test_a_refusal_says_why(body: str, told: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=400, text=body)

    assert answer_to(handler).error == told


def test_a_server_that_hangs_up_is_a_failure() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(text("a"))
        assert request.transport is not None
        request.transport.abort()
        return response

    answer = answer_to(handler)
    assert not answer.success
    assert answer.latency > 0


def test_nobody_there_is_a_failure() -> None:
    async def run() -> Answer:
        endpoint = Endpoint(url="http://127.0.0.1:1/v1/completions", kind="completions", model="m")
        async with OpenAIClient.open(endpoint) as client:
            return await client.ask(SAMPLE, "x")

    assert "127.0.0.1" in asyncio.run(run()).error


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_request_carries_what_was_asked_for(
    is_chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    seen: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json(), headers=request.headers)
        return web.Response(status=503)

    fields = {"top_k": 3, "temperature": 0.5}
    answer_to(
        handler,
        kind="chat" if is_chat else "completions",
        ignore_eos=True,
        fields=fields,
        headers={"x-more": "yes"},
    )
    headers = seen.pop("headers")
    assert headers["Authorization"] == "Bearer secret"
    assert headers["x-request-id"] == "bench-7"
    assert headers["x-more"] == "yes"
    what: dict[str, Any] = {"prompt": "once upon", "max_tokens": 8}
    if is_chat:
        messages = [{"role": "user", "content": "once upon"}]
        what = {"messages": messages, "max_completion_tokens": 8}
    assert seen == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **fields,
        **what,
    }


def whole(status: int = 200, **fields: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(fields, status=status)

    return handler


USED = {"prompt_tokens": 5, "total_tokens": 5}


@pytest.mark.parametrize(("kind", "field"), [("embeddings", "data"), ("rerank", "results")])
def test_vectors_and_ranks_are_answered_as_a_whole(kind: str, field: str) -> None:
    sample = Sample(prompt="once", prompt_len=3, output_len=1, others=("upon", "a"))
    answer = answer_to(whole(**{field: [{"index": 0}]}, usage=USED), sample, kind=kind)
    assert answer.error == ""
    assert answer.latency > 0
    assert (answer.ttft, answer.itl) == (0, [])
    assert (answer.prompt_tokens, answer.output_tokens) == (5, 0)
    answer = answer_to(whole(**{field: []}, usage=USED), sample, kind=kind)
    assert answer.error == "the answer is empty"
    answer = answer_to(whole(400, error={"message": "no"}), sample, kind=kind)
    assert answer.error == "HTTP 400: no"
    assert answer.latency > 0


@pytest.mark.parametrize(
    ("kind", "others", "expected"),
    [
        ("embeddings", (), {"input": "once"}),
        ("embeddings", ("upon", [5]), {"input": ["once", "upon", [5]]}),
        ("rerank", ("upon", "a"), {"query": "once", "documents": ["upon", "a"]}),
    ],
)
def test_requests_for_vectors_and_ranks(
    kind: str, others: tuple[Any, ...], expected: dict[str, Any]
) -> None:
    seen: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json())
        return web.Response(status=503)

    sample = Sample(prompt="once", prompt_len=1, output_len=1, others=others)
    answer_to(handler, sample, kind=kind, fields={"priority": 1})
    assert seen == {"model": "m", "priority": 1, **expected}


def test_a_rank_without_documents_is_refused() -> None:
    with pytest.raises(BenchError, match="a query and documents"):
        answer_to(whole(), kind="rerank")


def test_a_chat_of_token_ids_is_refused() -> None:
    sample = Sample(prompt=[1, 2], prompt_len=2, output_len=1)
    with pytest.raises(BenchError, match="a chat needs text"):
        answer_to(streaming(DONE), sample, kind="chat")


@given(
    st.lists(st.sampled_from([text("größe"), USAGE, b": comment\n\n", b"\r\n", DONE])), st.data()
)
def test_events_are_whole_wherever_a_stream_is_cut(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=9)))
    pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    lines = EventLines()
    found = [event for piece in pieces for event in lines.feed(piece)]
    assert found == [part[6:-2] for part in parts if part.startswith(b"data: ")]


@pytest.mark.parametrize(
    ("base_url", "backend", "endpoint", "url"),
    [
        (None, "openai", None, "http://h:1/v1/completions"),
        ("http://x:2/v1", "openai", None, "http://x:2/v1/completions"),
        ("https://x/api/v1/", "vllm-chat", None, "https://x/api/v1/chat/completions"),
        ("http://x", "openai", "/v1/other", "http://x/v1/other"),
        ("http://x/v1", "openai", "/other", "http://x/v1/other"),
    ],
)
def test_the_address_is_put_together(
    base_url: str | None, backend: str, endpoint: str | None, url: str
) -> None:
    assert targets.target_of(backend, base_url, "h", 1, endpoint, {}).url == url


def test_an_address_of_ipv6_has_brackets_and_nonsense_is_refused() -> None:
    assert targets.target_of("openai", None, "::1", 1, None, {}).root == "http://[::1]:1"
    with pytest.raises(BenchError, match="--base-url"):
        targets.target_of("openai", "x:1", "h", 1, None, {})


def test_a_server_tells_its_model_and_lends_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose tokens are letters."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "letters"}]})

    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response({"tokens": [ord(c) for c in (await request.json())["prompt"]]})

    async def detokenize(request: web.Request) -> web.Response:
        return web.json_response({"prompt": "".join(map(chr, (await request.json())["tokens"]))})

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        async with TestServer(app) as bare:
            target = targets.target_of("openai", str(bare.make_url("/")), "", 0, None, {})
            assert await asyncio.to_thread(target.first_model) == "letters"
            guessing = await asyncio.to_thread(targets.codec_of, target, "letters", None)
            assert isinstance(guessing, WordCodec)
        app = web.Application()
        app.router.add_post("/tokenize", tokenize)
        app.router.add_post("/detokenize", detokenize)
        async with TestServer(app) as whole:
            target = targets.target_of("openai", str(whole.make_url("/")), "", 0, None, {})
            codec = await asyncio.to_thread(targets.codec_of, target, "letters", None)
            assert isinstance(codec, ServerCodec)
            assert set(map(chr, codec.ids)) <= set(" abcdefghijklmnopqrstuvwxyz")
            assert await asyncio.to_thread(codec.encode, "ab") == [97, 98]
            with pytest.raises(BenchError, match="/v1/models"):
                await asyncio.to_thread(target.first_model)

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    asyncio.run(run())
