"""Requests, and what a client sees of their answers: over the async engine, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.record import percentile
from src import AsyncEngine, SamplingParams

MS = 1000.0


@dataclass(frozen=True)
class Answer:
    """When a client saw a request's tokens, in seconds of one clock."""

    sent: float
    first: float
    last: float
    num_tokens: int

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.last - self.first) / max(1, self.num_tokens - 1)


# (prompt token ids, output length) -> answer
Client = Callable[[list[int], int], Awaitable[Answer]]


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts that share no prefix, so that no cache helps."""
    source = random.Random(seed)
    return [[source.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def engine_client(engine: AsyncEngine) -> Client:
    """Streams greedy output of a fixed length from an engine in this process."""

    async def ask(prompt: list[int], output_len: int) -> Answer:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        sent = time.perf_counter()
        first, count = 0.0, 0
        async for delta in engine.stream(prompt, params):
            if not count:
                first = time.perf_counter()
            count += len(delta.token_ids)
        return Answer(sent, first, time.perf_counter(), count)

    return ask


def http_client(host: str, port: int) -> Client:
    """The same over HTTP/1.1, a connection per request, server-sent events read as they come.

    Written on bare streams: a client library would cost more than the server that is measured.
    """

    async def ask(prompt: list[int], output_len: int) -> Answer:
        body = json.dumps(
            {
                "prompt": prompt,
                "max_tokens": output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        sent = time.perf_counter()
        reader, writer = await asyncio.open_connection(host, port, limit=2**24)
        try:
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"the server answered {status!r}: {await reader.read()!r}")
            first, last, usage = 0.0, 0.0, b""
            async for line in reader:
                if line.startswith(b'data: {"'):
                    # The last event of the stream has the usage and no choice.
                    first = first or time.perf_counter()
                    last, usage = (last, line) if b'"choices":[]' in line else (now(), usage)
        finally:
            writer.close()
        count = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
        return Answer(sent, first, last, count)

    now = time.perf_counter
    return ask


async def one_by_one(client: Client, prompts: Sequence[list[int]], output_len: int) -> list[Answer]:
    """Each request after the one before has ended."""
    return [await client(prompt, output_len) for prompt in prompts]


async def side_by_side(
    client: Client, prompts: Sequence[list[int]], output_len: int, concurrency: int
) -> list[Answer]:
    """Always ``concurrency`` requests at once, until all are answered."""
    limit = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> Answer:
        async with limit:
            return await client(prompt, output_len)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


LATENCY = {"ttft": "ms", "tpot": "ms"}
THROUGHPUT = {
    "output_throughput": "tok/s",
    "total_throughput": "tok/s",
    "ttft_median": "ms",
    "ttft_p99": "ms",
    "tpot_median": "ms",
    "tpot_p99": "ms",
}


def latency(answers: Sequence[Answer]) -> list[dict[str, float]]:
    """Per answer, the figures of ``LATENCY``."""
    return [{"ttft": MS * answer.ttft, "tpot": MS * answer.tpot} for answer in answers]


def throughput(answers: Sequence[Answer], input_len: int) -> dict[str, float]:
    """Of one run of concurrent requests, the figures of ``THROUGHPUT``."""
    seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
    tokens = sum(answer.num_tokens for answer in answers)
    ttfts = [MS * answer.ttft for answer in answers]
    tpots = [MS * answer.tpot for answer in answers]
    return {
        "output_throughput": tokens / seconds,
        "total_throughput": (tokens + input_len * len(answers)) / seconds,
        "ttft_median": percentile(ttfts, 0.5),
        "ttft_p99": percentile(ttfts, 0.99),
        "tpot_median": percentile(tpots, 0.5),
        "tpot_p99": percentile(tpots, 0.99),
    }
