"""Sends requests and measures the answers as a client sees them: in process and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.record import percentile
from src import AsyncEngine, SamplingParams
from src.bench.openai_client import Endpoint, OpenAIClient
from src.bench.samples import Sample
from src.bench.target import target_of

MS = 1000.0


@dataclass(frozen=True)
class Answer:
    """Times of a request's tokens at the client, in seconds of one clock.

    ``gaps`` are the times between deliveries of tokens, if they were recorded.
    """

    sent: float
    first: float
    last: float
    num_tokens: int
    gaps: Sequence[float] = ()

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
    """Prompts without shared prefixes, so that the prefix cache does not help."""
    source = random.Random(seed)
    return [[source.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def engine_client(engine: AsyncEngine) -> Client:
    """A client that streams greedy output of a fixed length from an engine in this process."""

    async def ask(prompt: list[int], output_len: int) -> Answer:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        sent = time.perf_counter()
        times, count = [], 0
        async for delta in engine.stream(prompt, params):
            if delta.token_ids:
                times.append(time.perf_counter())
                count += len(delta.token_ids)
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return Answer(sent, times[0], time.perf_counter(), count, gaps)

    return ask


@contextlib.asynccontextmanager
async def http_client(url: str) -> AsyncIterator[Client]:
    """The same over HTTP, with the client of ``python -m src bench serve``."""
    target = target_of("openai", url, "", 0, None, {})
    endpoint = Endpoint(
        url=target.url,
        kind="completions",
        model=await asyncio.to_thread(target.first_model),
        fields={"temperature": 0},
        ignore_eos=True,
    )
    numbers = itertools.count()
    async with OpenAIClient.open(endpoint) as client:

        async def ask(prompt: list[int], output_len: int) -> Answer:
            sample = Sample(prompt=prompt, prompt_len=len(prompt), output_len=output_len)
            seen = await client.ask(sample, f"bench-{next(numbers)}")
            if not seen.success:
                raise RuntimeError(f"the server did not answer: {seen.error}")
            first, last = seen.start + seen.ttft, seen.start + seen.latency
            return Answer(seen.start, first, last, seen.output_tokens, seen.itl)

        yield ask


async def one_by_one(client: Client, prompts: Sequence[list[int]], output_len: int) -> list[Answer]:
    """Send each request after the previous one has ended."""
    return [await client(prompt, output_len) for prompt in prompts]


async def side_by_side(
    client: Client, prompts: Sequence[list[int]], output_len: int, concurrency: int
) -> list[Answer]:
    """Keep ``concurrency`` requests in progress until all are answered."""
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
    "itl_median": "ms",
    "itl_p99": "ms",
}


def latency(answers: Sequence[Answer]) -> list[dict[str, float]]:
    """The figures of ``LATENCY``, per answer."""
    return [{"ttft": MS * answer.ttft, "tpot": MS * answer.tpot} for answer in answers]


def throughput(answers: Sequence[Answer], input_len: int) -> dict[str, float]:
    """The figures of ``THROUGHPUT`` for one run of concurrent requests."""
    seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
    tokens = sum(answer.num_tokens for answer in answers)
    ttfts = [MS * answer.ttft for answer in answers]
    tpots = [MS * answer.tpot for answer in answers]
    # Answers of one token have no gaps.
    gaps = [MS * gap for answer in answers for gap in answer.gaps] or [0.0]
    return {
        "output_throughput": tokens / seconds,
        "total_throughput": (tokens + input_len * len(answers)) / seconds,
        "ttft_median": percentile(ttfts, 0.5),
        "ttft_p99": percentile(ttfts, 0.99),
        "tpot_median": percentile(tpots, 0.5),
        "tpot_p99": percentile(tpots, 0.99),
        "itl_median": percentile(gaps, 0.5),
        "itl_p99": percentile(gaps, 0.99),
    }
