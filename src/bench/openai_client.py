"""A client that streams from any server with OpenAI's protocol, and times what it sends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from src.bench.answers import Answer, Deliveries
from src.bench.connections import Connections, Reply
from src.bench.errors import BenchError, error_message
from src.bench.samples import Sample

API_KEY_VARIABLE: Final = "OPENAI_API_KEY"
# Time limit of one answer in seconds, as in vLLM.
_SECONDS: Final = 6 * 60 * 60
_DONE: Final = b"[DONE]"


class _Delta(msgspec.Struct):
    """A piece of a message. Any set field except the role means new content."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None
    role: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def piece(self) -> str:
        if self.delta is None:
            return self.text or ""
        delta = self.delta
        return delta.content or delta.reasoning_content or delta.reasoning or ""

    @property
    def has_tokens(self) -> bool:
        """Whether it brought tokens; part of a multi-byte character has no text yet."""
        delta = self.delta
        if self.piece or (delta is not None and delta.tool_calls):
            return True
        return self.finish_reason is None and (delta is None or delta.role is None)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode


Kind: TypeAlias = Literal["completions", "chat", "embeddings", "rerank"]
"""What is asked for. The last two are answered as a whole, and without tokens."""

POOLED: Final[frozenset[Kind]] = frozenset({"embeddings", "rerank"})


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What is requested, and how.

    Attributes
    ----------
    url
        The complete URL.
    kind
        What is asked for.
    model
        The model name in requests.
    headers
        Additional headers.
    fields
        Additional fields of every request, such as sampling parameters.
    ignore_eos
        Whether to ask for the full output length.
    count_tokens
        Counts the tokens of a text, for servers that do not report them; ``None`` counts
        deliveries.
    verify
        Whether certificates are checked.
    """

    url: str
    kind: Kind
    model: str
    headers: Mapping[str, str] = {}
    fields: Mapping[str, Any] = {}
    ignore_eos: bool = False
    count_tokens: Callable[[str], int] | None = None
    verify: bool = True


def key_headers() -> dict[str, str]:
    """The header with the key from ``OPENAI_API_KEY``, if it is set."""
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


class OpenAIClient:
    """Streams one answer per call of `ask`; open it with `open`."""

    def __init__(self, endpoint: Endpoint, connections: Connections) -> None:
        self._endpoint = endpoint
        self._connections = connections

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, endpoint: Endpoint) -> AsyncIterator[OpenAIClient]:
        """A client whose connections are kept and closed at the end.

        Raises
        ------
        BenchError
            httptools is not installed.
        """
        async with Connections.open(endpoint.url, endpoint.verify) as connections:
            yield cls(endpoint, connections)

    async def ask(self, sample: Sample, request_id: str) -> Answer:
        """Stream one answer; any failure is recorded as its ``error``."""
        endpoint = self._endpoint
        body = msgspec.json.encode(self.body(sample))
        headers = {
            "Content-Type": "application/json",
            "x-request-id": request_id,
            **key_headers(),
            **endpoint.headers,
        }
        answer = Answer(start=time.perf_counter(), prompt_tokens=sample.prompt_len)
        try:
            async with asyncio.timeout(_SECONDS):
                reply = await self._connections.post(body, headers)
            if reply.status == 200 and endpoint.kind in POOLED:
                _read_whole(reply, answer)
            elif reply.status == 200:
                self._read(reply, answer)
            else:
                answer.error = f"HTTP {reply.status}: {error_message(reply.body)}"
        except Exception as error:
            answer.error = f"{type(error).__name__}: {error}"
        if answer.error:
            answer.latency = time.perf_counter() - answer.start
        return answer

    def body(self, sample: Sample) -> dict[str, Any]:
        """The request body for a sample."""
        endpoint = self._endpoint
        if endpoint.kind in POOLED:
            return {"model": endpoint.model, **_texts(endpoint.kind, sample), **endpoint.fields}
        fields: dict[str, Any] = {
            "model": endpoint.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if endpoint.kind == "chat":
            if not isinstance(sample.prompt, str):
                raise BenchError("a chat needs text, and the prompts are token ids")
            fields["messages"] = [{"role": "user", "content": sample.prompt}]
            fields["max_completion_tokens"] = sample.output_len
        else:
            fields["prompt"] = sample.prompt
            fields["max_tokens"] = sample.output_len
        if endpoint.ignore_eos:
            fields["ignore_eos"] = True
        return {**fields, **endpoint.fields}

    def _read(self, reply: Reply, answer: Answer) -> None:
        """Time the events of a stream, and count its tokens."""
        deliveries = Deliveries(answer)
        usage: _Usage | None = None
        pieces: list[str] = []
        ended = False
        events = EventLines()
        for now, data in reply.pieces:
            for event in events.feed(data):
                if event == _DONE:
                    ended = True
                    continue
                chunk = _decode(event)
                if chunk.error is not None:
                    answer.error = error_message(event)
                    return
                usage = chunk.usage or usage
                for choice in chunk.choices or ():
                    if choice.has_tokens:
                        deliveries.tokens(now)
                        pieces.append(choice.piece)
                    if choice.finish_reason is not None:
                        deliveries.end(now)
                        ended = True
        answer.text = "".join(pieces)
        if not answer.latency:
            answer.error = "the stream had no tokens"
        elif not ended:
            answer.error = "the stream broke off"
        self._count(answer, usage, len(pieces))

    def _count(self, answer: Answer, usage: _Usage | None, deliveries: int) -> None:
        count = self._endpoint.count_tokens
        if usage is None or usage.completion_tokens is None:
            answer.output_tokens = deliveries if count is None else count(answer.text)
        else:
            answer.output_tokens = usage.completion_tokens
        if usage is not None:
            answer.prompt_tokens = usage.prompt_tokens or answer.prompt_tokens
            if usage.prompt_tokens_details is not None:
                answer.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


def _texts(kind: Kind, sample: Sample) -> dict[str, Any]:
    """The texts of a request that is answered as a whole; a query is the first of them."""
    if kind == "embeddings":
        return {"input": [sample.prompt, *sample.others] if sample.others else sample.prompt}
    if not isinstance(sample.prompt, str) or not sample.others:
        raise BenchError("a rank needs a query and documents as text")
    return {"query": sample.prompt, "documents": list(sample.others)}


class _Whole(msgspec.Struct):
    data: list[msgspec.Raw] | None = None
    results: list[msgspec.Raw] | None = None
    usage: _Usage | None = None


_decode_whole: Final = msgspec.json.Decoder(_Whole).decode


def _read_whole(reply: Reply, answer: Answer) -> None:
    """Time an answer that comes as a whole."""
    answer.latency = reply.pieces[-1][0] - answer.start
    whole = _decode_whole(reply.body)
    if not whole.data and not whole.results:
        answer.error = "the answer is empty"
    elif whole.usage is not None:
        answer.prompt_tokens = whole.usage.prompt_tokens or answer.prompt_tokens


class EventLines:
    """Extracts the data of server-sent events from pieces of a stream with arbitrary bounds."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The complete events so far; in this protocol, an event is one line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
