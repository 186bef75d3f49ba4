"""Over a real socket: hypercorn as a user starts it, and the official client."""

from __future__ import annotations

import asyncio
import http.client
import random
import socket
import time
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from tests.http.processes import ServerProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

PROMPT = "Once upon a time"
# As for SamplingParams that OpenAI does not have.
GO_ON = {"ignore_eos": True}


@pytest.fixture
def sync_client(hypercorn: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{hypercorn.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def async_client(hypercorn: ServerProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{hypercorn.url}/v1", api_key="none", max_retries=0)


def gauge(server: ServerProcess, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])


def wait_idle(server: ServerProcess) -> None:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + 60
    while any(gauge(server, name) for name in names):
        assert time.monotonic() < deadline, "the engine is not idle"
        time.sleep(0.05)


def test_the_port_opens_at_once_and_tells_how_far_the_start_is(hypercorn: ServerProcess) -> None:
    for answer in hypercorn.early.values():
        assert answer.status_code == 503
        assert set(answer.json()) == {"phase", "progress"}
        assert 0 <= answer.json()["progress"] < 1
        assert "retry-after" in answer.headers


def test_the_synchronous_client(sync_client: openai.OpenAI) -> None:
    with sync_client as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        whole = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=12,
            temperature=0,
            logprobs=True,
            top_logprobs=1,
        )
        assert whole.usage is not None
        assert whole.choices[0].logprobs is not None
        with client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as events:
            chunks = list(events)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        completion = client.completions.create(
            model="tiny", prompt=[PROMPT, PROMPT], max_tokens=3, temperature=0, logprobs=1
        )
        assert completion.choices[0].text == completion.choices[1].text


async def test_the_asynchronous_client_and_its_errors(async_client: openai.AsyncOpenAI) -> None:
    async with async_client as client:
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=5, stream=True, extra_body=GO_ON
        )
        async with stream:
            reasons = [chunk.choices[0].finish_reason async for chunk in stream]
        assert reasons[-1] == "length"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt=PROMPT)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt=PROMPT, temperature=3)
        assert bad.value.param == "temperature"


async def test_64_streams_with_random_disconnects_leave_nothing(
    hypercorn: ServerProcess, async_client: openai.AsyncOpenAI
) -> None:
    rng = random.Random(5)
    before = gauge(hypercorn, "slipstream_client_disconnects_total")
    finished = left = 0

    async def talk(number: int) -> None:
        nonlocal finished, left
        most = rng.randrange(1, 12) if number % 2 else 10**6
        stream = await async_client.completions.create(
            model="tiny",
            prompt=f"{PROMPT} {number}",
            # Those that leave would have more to come.
            max_tokens=400 if most < 12 else 40,
            n=1 + number % 4 // 2,
            stream=True,
            extra_body=GO_ON,
        )
        async with stream:
            seen = 0
            async for _ in stream:
                seen += 1
                if seen > most:
                    left += 1
                    return
        finished += 1

    async with async_client:
        await asyncio.gather(*(talk(number) for number in range(64)))
    assert finished >= 32
    assert left > 10
    await asyncio.to_thread(wait_idle, hypercorn)
    assert gauge(hypercorn, "slipstream_client_disconnects_total") - before >= left // 2
    # The pool proves itself whenever the engine is idle, and says so in the log when it is not.
    assert "ERROR" not in hypercorn.output
    answer = await asyncio.to_thread(hypercorn.get, "/health")
    assert answer.status_code == 200


async def test_a_client_that_leaves_a_whole_answer_frees_it(hypercorn: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1000, "n": 8, **GO_ON}
    timeout = httpx.Timeout(60, read=0.1)
    async with httpx.AsyncClient(base_url=hypercorn.url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=body, timeout=timeout)
    await asyncio.to_thread(wait_idle, hypercorn)


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
def test_a_huge_body_is_refused_and_read_to_its_end(hypercorn: ServerProcess, path: str) -> None:
    # 50 MB go through hypercorn's reader, which hangs for ever where nobody takes them from it.
    body = b'{"prompt": "' + b"a" * 50_000_000 + b'"}'
    headers = {"content-type": "application/json"}
    answer = httpx.post(hypercorn.url + path, content=body, headers=headers, timeout=30)
    assert answer.status_code == (413 if path.startswith("/v1") else 404)
    assert "error" in answer.json()
    assert hypercorn.get("/live").status_code == 200


def until_closed(port: int, head: bytes, seconds: float) -> tuple[bytes, float]:
    """What is answered to a request that stops there, and when its first byte came."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        started = time.monotonic()
        connection.sendall(head)
        first = connection.recv(65536)
        return first, time.monotonic() - started


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"POST /v1/completions", b"413"),
        (b"POST /nowhere", b"404"),
        (b"POST /live", b"405"),
        (b"GET /live", b"200"),
    ],
)
def test_nobody_waits_for_a_body_that_changes_nothing(
    hypercorn: ServerProcess, request_line: bytes, status: bytes
) -> None:
    head = request_line + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
    answer, seconds = until_closed(hypercorn.port, head, 60)
    assert answer.startswith(b"HTTP/1.1 " + status)
    # A body may take thirty seconds.
    assert seconds < 15


def test_the_path_that_decides_is_the_one_that_was_asked_for(hypercorn: ServerProcess) -> None:
    """A forged Host header changes nothing about what is served: without keys, nothing is."""
    with socket.create_connection(("127.0.0.1", hypercorn.port), timeout=10) as connection:
        connection.sendall(
            b"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1/live?\r\nConnection: close\r\n\r\n"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 421")


def test_responses_and_their_events(hypercorn: ServerProcess, sync_client: openai.OpenAI) -> None:
    with sync_client as client:
        with client.responses.stream(
            model="tiny", input="hello", temperature=0, max_output_tokens=12
        ) as events:
            received = list(events)
        kinds = [event.type for event in received]
        assert received[-1].type == "response.incomplete"
        last = received[-1].response
        assert kinds.count("response.output_text.delta") > 1
        assert last.output_text
        assert client.responses.retrieve(last.id).output_text == last.output_text
        following = client.responses.create(
            model="tiny", input="go on", previous_response_id=last.id, max_output_tokens=5
        )
        assert following.usage is not None
        assert last.usage is not None
        assert following.usage.input_tokens > last.usage.input_tokens


def test_messages_and_their_events(hypercorn: ServerProcess) -> None:
    fields = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "hello"}]}
    with anthropic.Anthropic(base_url=hypercorn.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(**fields, extra_body={"temperature": 0}) as events:
            text = "".join(events.text_stream)
            joined = events.get_final_message()
        whole = client.messages.create(**fields, extra_body={"temperature": 0})
        assert whole.content[0].text == text == joined.content[0].text
        assert whole.usage.output_tokens == joined.usage.output_tokens == 12


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_client_that_leaves_a_stream_ends_it(hypercorn: ServerProcess, path: str) -> None:
    body = {"stream": True, "ignore_eos": True, "max_output_tokens": 900}
    body |= {"input": "hello"}
    if path == "/v1/messages":
        body = {"stream": True, "ignore_eos": True, "max_tokens": 900}
        body |= {"messages": [{"role": "user", "content": "hello"}]}
    with httpx.stream("POST", hypercorn.url + path, json=body, timeout=30) as answer:
        assert answer.status_code == 200
        for _ in zip(range(5), answer.iter_lines(), strict=False):
            pass
    wait_idle(hypercorn)


def sockets_of(server: ServerProcess) -> int:
    """Open sockets of the server and all that it started."""
    count = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # Behind the name in parentheses: state, parent, group, session.
            session = (folder / "stat").read_text().rpartition(")")[2].split()[3]
            if int(session) == server.process.pid:
                links = [link.readlink() for link in (folder / "fd").iterdir()]
                count += sum(str(link).startswith("socket:") for link in links)
        except OSError:
            continue
    return count


def test_what_an_idle_client_has_closed_is_closed(hypercorn: ServerProcess) -> None:
    before = sockets_of(hypercorn)
    for _ in range(30):
        client = http.client.HTTPConnection("127.0.0.1", hypercorn.port, timeout=10)
        client.request("GET", "/live")
        assert client.getresponse().read()
        client.close()
    deadline = time.monotonic() + 60
    while sockets_of(hypercorn) > before:
        assert time.monotonic() < deadline, "connections are kept that nobody holds"
        time.sleep(0.05)
