"""Requests are sent when due, no more than allowed at once, and none ends the run."""

from __future__ import annotations

import asyncio
import time

import pytest

from src.bench.answers import Answer
from src.bench.load import run_load
from src.bench.samples import Sample

SAMPLES = [Sample(prompt=str(i), prompt_len=1, output_len=1) for i in range(12)]


class Server:
    """Answers after ``seconds``, and remembers how many it had at once."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.running = self.most = 0
        self.asked: list[tuple[str, str, float]] = []

    async def ask(self, sample: Sample, request_id: str) -> Answer:
        start = time.perf_counter()
        self.asked.append((str(sample.prompt), request_id, start))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        return Answer(start=start, latency=self.seconds, text=str(sample.prompt))


@pytest.mark.parametrize(("limit", "most"), [(None, 12), (1, 1), (5, 5)])
def test_no_more_than_allowed_are_under_way(limit: int | None, most: int) -> None:
    server = Server()
    seen: list[Answer] = []
    run = asyncio.run(
        run_load(server.ask, SAMPLES, [0.0] * 12, max_concurrency=limit, on_answer=seen.append)
    )
    assert server.most == most
    assert [answer.text for answer in run.answers] == [str(i) for i in range(12)]
    assert {id(answer) for answer in seen} == {id(answer) for answer in run.answers}
    assert [asked[1] for asked in server.asked] == [f"bench-{i}" for i in range(12)]
    if limit == 1:
        # Whoever comes last has waited for all others.
        assert run.answers[-1].queued > 10 * server.seconds
        assert run.answers[0].queued < run.answers[-1].queued
    assert run.duration >= server.seconds


def test_no_request_is_sent_before_it_is_due() -> None:
    server = Server()
    times = [0.0, 0.03, 0.03, 0.08]
    begun = time.perf_counter()
    asyncio.run(run_load(server.ask, SAMPLES[:4], times))
    assert all(asked[2] - begun >= due for asked, due in zip(server.asked, times, strict=True))


def test_a_client_that_raises_is_a_failed_request() -> None:
    async def ask(sample: Sample, request_id: str) -> Answer:
        if sample.prompt == "1":
            raise ValueError("what nobody thought of")
        return Answer(text="fine")

    run = asyncio.run(run_load(ask, SAMPLES[:3], [0.0] * 3))
    assert [answer.error for answer in run.answers] == [
        "",
        "ValueError: what nobody thought of",
        "",
    ]
