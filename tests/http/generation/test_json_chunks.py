"""Long answers are made in pieces, which are the same text and leave the event loop to others."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette

from src.core.errors import InvalidRequestError
from src.core.outputs import (
    Completion,
    Delta,
    FinishReason,
    GenerationResult,
    TokenLogprobs,
    Usage,
)
from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine
from src.engine.requests.submission import Submission
from src.http.completions.encoder import CompletionEncoder
from src.http.generation import logprobs as logprobs_module
from src.http.generation.generation import forward, submitted
from src.http.generation.job import GenerationJob
from src.http.generation.json_chunks import SLICE, apart, gathered, json_array, json_chunks, sliced
from src.http.generation.logprobs import check_number
from src.http.generation.prompts import Echo
from src.http.generation.split_delta import split_delta
from src.http.protocol.completions import CompletionRequest
from src.http.server.call import PIECE, _parcels
from src.text.detokenizer import AfterPrompt, IncrementalDetokenizer
from tests.http.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

USAGE = Usage(prompt_tokens=1, completion_tokens=1)
LISTS = st.lists(st.lists(st.integers()))


def scored(token_id: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.5, 1, tuple((3 + i, -0.25 * i) for i in range(top)))


@given(values=st.lists(st.text(), max_size=3 * SLICE), others=LISTS)
def test_pieces_are_the_same_text(values: list[str], others: list[list[int]]) -> None:
    encode = msgspec.json.encode
    assert b"".join(sliced(values, list)) == encode(values)
    assert b"".join(json_array([encode(item)] for item in others)) == encode(others)
    for value, same in (
        ({"a": "\0", "b": others}, {"a": "\0", "b": others}),
        ({"a": "\0", "b": apart([b"[1,", b"2]"])}, {"a": "\0", "b": [1, 2]}),
        ([apart([b"{}"]), {"c": apart([b"1"])}, others], [{}, {"c": 1}, others]),
    ):
        assert b"".join(json_chunks(value)) == encode(same)
    with pytest.raises(AssertionError, match="object"):
        list(json_chunks(object()))


@given(sizes=st.lists(st.integers(0, 3 * PIECE), max_size=6))
def test_parcels_are_the_same_bytes(sizes: list[int]) -> None:
    pieces = [bytes([65 + index]) * size for index, size in enumerate(sizes)]
    parcels = list(_parcels(pieces))
    assert b"".join(parcels) == b"".join(pieces)
    assert [len(parcel) for parcel in parcels[:-1]] == [PIECE] * (len(parcels) - 1)
    assert len(parcels[-1]) <= PIECE
    assert parcels[-1] or not any(sizes)


@given(
    text=st.text(max_size=100),
    num_tokens=st.integers(0, 3 * SLICE),
    num_scored=st.none() | st.integers(0, 3 * SLICE),
    has_logprobs=st.booleans(),
    begun=st.none() | st.sets(st.integers(0, 3 * SLICE)),
)
def test_portions_join_to_the_delta(
    text: str,
    num_tokens: int,
    num_scored: int | None,
    has_logprobs: bool,
    begun: set[int] | None,
) -> None:
    starts = None if begun is None else sorted(each for each in begun if each < num_tokens)
    delta = Delta(
        request_id="x",
        index=1,
        text=text,
        token_ids=list(range(num_tokens)),
        logprobs=[scored(i, 1) for i in range(num_tokens)] if has_logprobs else None,
        prompt_logprobs=None if num_scored is None else [scored(i, 1) for i in range(num_scored)],
        finish_reason=FinishReason.STOP,
        stop_reason="x",
        usage=USAGE,
        step_starts=starts,
    )
    parts = list(split_delta(delta))
    assert "".join(part.text for part in parts) == text
    first = itertools.accumulate([len(part.token_ids) for part in parts], initial=0)
    assert [
        begin + start
        for begin, part in zip(first, parts, strict=False)
        for start in part.begins_steps
    ] == delta.begins_steps
    assert [i for part in parts for i in part.token_ids] == delta.token_ids
    assert [e for part in parts for e in part.logprobs or ()] == (delta.logprobs or [])
    assert [e for part in parts for e in part.prompt_logprobs or ()] == (
        delta.prompt_logprobs or []
    )
    for part in parts:
        assert len(part.logprobs or ()) + len(part.prompt_logprobs or ()) <= SLICE
        assert part.logprobs is None or len(part.logprobs) == len(part.token_ids)
        assert (part.index, part.usage) == (1, USAGE)
    ends = [(part.finish_reason, part.stop_reason) for part in parts]
    assert ends == [(None, None)] * (len(parts) - 1) + [(FinishReason.STOP, "x")]


def test_many_tokens_are_read_in_portions() -> None:
    delta = Delta(
        request_id="x", index=0, text="ab" * 5_000, token_ids=list(range(5_000)), usage=USAGE
    )
    parts = list(split_delta(delta))
    assert max(len(part.token_ids) for part in parts) <= 1024
    assert [i for part in parts for i in part.token_ids] == delta.token_ids
    assert "".join(part.text for part in parts) == delta.text


def result(prompt_len: int, n: int, num_tokens: int, top: int) -> GenerationResult:
    entries = [scored(5 + i % 50, top) for i in range(num_tokens)]
    ids = [entry.token_id for entry in entries]
    return GenerationResult(
        request_id="x",
        prompt_token_ids=[5 + i % 50 for i in range(prompt_len)],
        completions=[
            Completion(
                index=index,
                text="x",
                token_ids=ids,
                logprobs=entries,
                finish_reason=FinishReason.LENGTH,
            )
            for index in range(n)
        ],
        usage=USAGE,
        prompt_logprobs=[None, *(scored(5 + i % 50, top) for i in range(1, prompt_len))],
    )


def shape(engine: AsyncEngine, of: GenerationResult, **fields: Any) -> CompletionEncoder:
    echoes = [Echo("prompt", 0, skips_special_tokens=True)] if "echo" in fields else None
    return CompletionEncoder(
        CompletionRequest(prompt="x", **fields),
        engine,
        model="tiny",
        prompt_token_ids=[of.prompt_token_ids],
        echoes=echoes,
    )


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}])
async def test_what_choices_share_of_their_prompt_is_made_once(
    engine: AsyncEngine, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[int] = []
    finite = logprobs_module._finite

    def counting(value: float) -> float:
        named.append(0)
        return finite(value)

    monkeypatch.setattr(logprobs_module, "_finite", counting)
    of = result(prompt_len=100, n=16, num_tokens=0, top=2)
    pieces = list(shape(engine, of, n=16, **fields).body([of], USAGE))
    assert 100 < len(named) < 500
    choices = json.loads(b"".join(pieces))["choices"]
    assert len(choices) == 16
    name = "prompt_logprobs" if "prompt_logprobs" in fields else "logprobs"
    assert all(choice[name] == choices[0][name] for choice in choices)
    single = shape(engine, of, **fields).body([result(100, 1, 0, 2)], USAGE)
    assert json.loads(b"".join(single))["choices"][0][name] == choices[0][name]
    # Nor is it held more than once.
    held = sum(len(piece) for piece in {id(piece): piece for piece in pieces}.values())
    assert held < sum(map(len, pieces)) / 8


async def test_a_long_answer_is_made_while_others_have_their_turns(engine: AsyncEngine) -> None:
    of = result(prompt_len=1000, n=2, num_tokens=200, top=20)
    made = shape(engine, of, n=2, echo=True, logprobs=20, prompt_logprobs=20).body([of], USAGE)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    pieces = await gathered(made)
    counting.cancel()
    # Of some milliseconds each: it takes tenths of a second in all.
    assert turns > 10
    assert len(json.loads(b"".join(pieces))["choices"]) == 2


@pytest.fixture
def late_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a stream begins when all of it has been generated."""
    take = Submission.take

    async def late(submission: Submission) -> list[Delta]:
        await until(lambda: submission._stream.finished)
        return await take(submission)

    monkeypatch.setattr(Submission, "take", late)


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in data]


GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("echo", [False, True])
async def test_a_slow_readers_completion_comes_in_portions(
    client: httpx.AsyncClient, late_readers: None, echo: bool
) -> None:
    body = {"prompt": [20 + i for i in range(70)], "max_tokens": 50, "logprobs": 2, "echo": echo}
    body |= GREEDY
    (whole,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    pieces = [event["choices"][0] for event in await streamed(client, "/v1/completions", body)]
    assert len(pieces) == -(-50 // SLICE) + (-(-70 // SLICE) if echo else 0)
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name, values in whole["logprobs"].items():
        joined = [value for piece in pieces for value in piece["logprobs"][name]]
        assert len(joined) == len(values) == 50 + 70 * echo
        if name in ("tokens", "text_offset"):
            assert joined == values
    assert [piece["finish_reason"] for piece in pieces[-2:]] == [None, "length"]


async def test_a_slow_readers_chat_and_response_come_in_portions(
    client: httpx.AsyncClient, late_readers: None
) -> None:
    messages = [{"role": "user", "content": "Tell me"}]
    body = {"messages": messages, "max_tokens": 50, "logprobs": True, "top_logprobs": 2, **GREEDY}
    (whole,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    _, *events = await streamed(client, "/v1/chat/completions", body)
    *pieces, end = [event["choices"][0] for event in events]
    assert end["finish_reason"] == "length"
    assert len(pieces) == -(-50 // SLICE)
    text = "".join(piece["delta"].get("content", "") for piece in pieces)
    assert text == whole["message"]["content"]
    tokens = [entry["token"] for piece in pieces for entry in piece["logprobs"]["content"]]
    assert tokens == [entry["token"] for entry in whole["logprobs"]["content"]]

    body = {"input": "Tell me", "max_output_tokens": 50, "top_logprobs": 2, **GREEDY}
    events = await streamed(client, "/v1/responses", body)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) == -(-50 // SLICE)
    assert "".join(event["delta"] for event in deltas) == text
    assert [e["token"] for event in deltas for e in event["logprobs"]] == tokens
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == tokens


BOUNDED = [
    ("/v1/completions", {"prompt": [20] * 30, "n": 2, "prompt_logprobs": 1}, "prompt_logprobs"),
    ("/v1/completions", {"prompt": [20] * 60, "echo": True, "logprobs": 1}, "logprobs"),
    ("/v1/completions", {"prompt": [[20], [21]], "max_tokens": 40, "logprobs": 1}, "logprobs"),
    ("/v1/chat/completions", {"prompt_logprobs": 20, "max_tokens": 4}, "prompt_logprobs"),
    ("/v1/chat/completions", {"max_tokens": 60, "logprobs": True, "top_logprobs": 1}, "logprobs"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 60, "top_logprobs": 1}, "top_logprobs"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BOUNDED)
async def test_the_number_of_logprobs_in_an_answer_is_bounded(
    client: httpx.AsyncClient,
    app: Starlette,
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    param: str,
) -> None:
    http = msgspec.structs.replace(engine.config.http, max_logprobs_per_answer=100)
    config = msgspec.structs.replace(engine.config, http=http)
    monkeypatch.setattr(engine, "config", config)
    monkeypatch.setattr(app.state.server, "config", config)
    messages = [{"role": "user", "content": "Tell me"}]
    body = {**({"messages": messages} if "chat" in path else {}), **GREEDY, **fields}
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "at most 100 log-probabilities" in error["message"]
    assert engine.stats.num_running == engine.stats.num_waiting == 0
    fewer = {name: value for name, value in body.items() if "logprobs" not in name}
    assert (await client.post(path, json=fewer)).status_code == 200


async def test_what_goes_wrong_in_a_direct_write_is_the_readers(
    engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[bytes] = []

    async def write(events: bytes) -> None:
        written.append(events)

    class Bounded:
        def events(self, prompt: int, delta: Delta) -> bytes:
            check_number(delta.usage.completion_tokens, 5, "top_logprobs")
            return b"x" * len(delta.token_ids)

    direct = SimpleNamespace(is_ready=True, write=written.append)
    call: Any = SimpleNamespace(started=True, direct=direct, write=write)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    job = GenerationJob(engine=engine, model="tiny", prompts=[("x", params)])
    with caplog.at_level(logging.WARNING):
        async with submitted(job, "x", None) as (submission,):
            with pytest.raises(InvalidRequestError, match="top_logprobs"):
                await forward(call, 0, submission, Bounded())
    assert b"".join(written) == b"xxxxx"
    assert not caplog.records


async def test_a_prompt_is_read_once_for_all_its_choices(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_prompt = IncrementalDetokenizer._read_prompt
    lengths: list[int] = []

    def counting(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> AfterPrompt:
        lengths.append(len(token_ids))
        return read_prompt(detokenizer, token_ids)

    monkeypatch.setattr(IncrementalDetokenizer, "_read_prompt", counting)
    body = {"prompt": [20] * 30, "n": 8, "max_tokens": 2, "logprobs": 1}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    # For the texts, and for where the tokens with log-probabilities stand in them.
    assert lengths == [30, 30]


async def test_no_piece_takes_long(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    of = result(prompt_len=200, n=2, num_tokens=200, top=20)
    finite = logprobs_module._finite
    asked = 0

    def counting(value: float) -> float:
        nonlocal asked
        asked += 1
        return finite(value)

    monkeypatch.setattr(logprobs_module, "_finite", counting)
    for fields in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}, {"logprobs": 20}):
        body: Iterator[bytes] = shape(engine, of, n=2, **fields).body([of], USAGE)
        for _ in body:
            assert asked <= SLICE * 22
            asked = 0
