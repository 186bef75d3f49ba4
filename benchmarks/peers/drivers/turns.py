"""Common part of all drivers: opens the engine, then answers turns until its input ends.

A driver runs under its peer's Python, where nothing of this project is installed, so it only uses
the standard library. It gets one JSON object as its argument and communicates by JSON lines.

    out  {"ready": T, "about": {...}}        T: `time.monotonic`, which processes share
    in   {"prompts": [[id, ...], ...], "output_len": N}
    out  {"answers": [[sent, first, last, [id, ...]], ...]}

All prompts of a turn are sent at once. Output of the engine itself goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

# (time sent, time of the first token, time of the last token, tokens)
Answer = tuple[float, float, float, list[int]]
# (prompts, output length) -> answers in the same order
Ask = Callable[[list[list[int]], int], list[Answer]]
# Yields the new tokens of one prompt as they arrive
Stream = Callable[[list[int], int], AsyncIterator[list[int]]]


class Clocked:
    """Records the times of one request's tokens."""

    def __init__(self) -> None:
        self.sent = time.monotonic()
        self.first = self.last = 0.0
        self.tokens: list[int] = []

    def take(self, tokens: list[int]) -> None:
        """Add tokens that have arrived now."""
        if tokens:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.tokens += tokens

    @property
    def answer(self) -> Answer:
        return self.sent, self.first, self.last, self.tokens


def of_streams(runner: asyncio.Runner, stream: Stream) -> Ask:
    """Turns for an engine that streams: one task per prompt."""

    async def one(prompt: list[int], output_len: int) -> Answer:
        request = Clocked()
        async for tokens in stream(prompt, output_len):
            request.take(tokens)
        return request.answer

    async def all_of(prompts: list[list[int]], output_len: int) -> list[Answer]:
        return list(await asyncio.gather(*(one(prompt, output_len) for prompt in prompts)))

    return lambda prompts, output_len: runner.run(all_of(prompts, output_len))


def answer_turns(open_engine: Callable[[dict[str, Any]], tuple[Ask, dict[str, Any]]]) -> None:
    """Open the engine and answer turns; ``open_engine`` gets the program's argument."""
    # Before the engine is imported, so that its own output does not mix with the answers.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ask, about = open_engine(json.loads(sys.argv[1]))
    out.write(json.dumps({"ready": time.monotonic(), "about": about}) + "\n")
    for line in sys.stdin:
        turn = json.loads(line)
        answers = ask(turn["prompts"], turn["output_len"])
        out.write(json.dumps({"answers": answers}) + "\n")
    # Exit at once, because engines with threads and child processes take long to shut down.
    os._exit(0)
