"""How long the event loop has no turn, told apart from what a machine does to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

ATTEMPTS = 6
# Eight megabytes, twenty milliseconds.
_DEAREST = b'"' + b"\\\\" * (4 * 2**20) + b'"'


class Heartbeat:
    """The most that this process computed while the event loop had no turn, in seconds.

    Unlike time on the clock this does not grow when the machine is busy with something else.
    """

    def __init__(self) -> None:
        self.most = 0.0

    async def beat(self) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            self.most = max(self.most, now - last)
            last = now


async def held_up(work: Callable[[], Awaitable[None]], bound: float) -> list[float]:
    """The most of each attempt at ``work``, in seconds, up to the first one below ``bound``.

    A machine may take the CPU away at any moment, and may count that as computed. What holds up
    the loop by itself does so at every attempt.
    """
    most: list[float] = []
    while len(most) < ATTEMPTS and min(most, default=bound) >= bound:
        heart = Heartbeat()
        beating = asyncio.create_task(heart.beat())
        try:
            await work()
        finally:
            beating.cancel()
        most.append(heart.most)
    return most


def bound_on_turns(least: float) -> float:
    """Five times what the dearest body takes to be decoded on this machine now; at least that.

    Decoding one body is the most that the loop does in one turn.
    """
    found = []
    for _ in range(3):
        begun = time.thread_time()
        msgspec.json.decode(_DEAREST)
        found.append(time.thread_time() - begun)
    return max(least, 5 * min(found))
