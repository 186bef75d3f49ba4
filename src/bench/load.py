"""Sends the requests of a workload at their times, and collects the answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from src.bench.answers import Answer, Ask
from src.bench.samples import Sample


class Run(msgspec.Struct, frozen=True):
    """The answers in the order of their requests, and the total duration in seconds."""

    answers: list[Answer]
    duration: float


async def run_load(
    ask: Ask,
    samples: Sequence[Sample],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    request_id_prefix: str = "bench-",
    on_answer: Callable[[Answer], None] | None = None,
) -> Run:
    """Send each sample at its time, and wait for all answers.

    A failed request is an answer with an ``error``; nothing that a server does ends the run.

    Parameters
    ----------
    times
        Seconds from now, ascending.
    max_concurrency
        Maximal number of concurrent requests; further ones wait in the client.
    on_answer
        Called with each complete answer.
    """
    turn = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    begun = time.perf_counter()

    async def one(index: int, sample: Sample) -> Answer:
        due = time.perf_counter()
        async with turn:
            sent = time.perf_counter()
            answer = await _asked(ask, sample, f"{request_id_prefix}{index}", sent)
        answer.queued = sent - due
        if on_answer is not None:
            on_answer(answer)
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, (sample, due) in enumerate(zip(samples, times, strict=True)):
            if (wait := begun + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(index, sample)))
    return Run([task.result() for task in tasks], time.perf_counter() - begun)


async def _asked(ask: Ask, sample: Sample, request_id: str, sent: float) -> Answer:
    try:
        return await ask(sample, request_id)
    except Exception as error:
        # Any other error: the other requests go on.
        reason = f"{type(error).__name__}: {error}"
        return Answer(start=sent, latency=time.perf_counter() - sent, error=reason)
