"""Work on long bodies, beside the event loop and one body at a time.

Python runs one thread at a time, and one that waits for its turn gets it after milliseconds. So a
thread for each body would hold up the event loop by all of them together. Here a body waits for
those before it instead, and the work on it pauses, so that the event loop gets its turn at once.
Owners of keys take turns, so that nobody waits for all that somebody else has sent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Final, ParamSpec, TypeVar

from src.core.in_turns import InTurns

# What is worked on between two pauses, in bytes. It takes a tenth of a millisecond.
PIECE_BYTES: Final = 64 * 1024
_PAUSE: Final = 50e-6
# Longer bodies, and compressed ones, which may be any length, wait among themselves.
_LONG_BYTES: Final = 1024 * 1024

OWNER: Final[ContextVar[str]] = ContextVar("OWNER", default="")
"""Whose request it is that a task serves; empty where no owners are told apart."""

P = ParamSpec("P")
T = TypeVar("T")


class _Lane:
    """A thread, and the work that waits for it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: InTurns[tuple[Future[Any], Callable[[], Any]]] = InTurns()

    def submit(self, owner: str, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._waiting.push(owner, (future, work))
        # As many turns as there is work, and each takes what is next then.
        self._thread.submit(self._take_turn)
        return future

    def _take_turn(self) -> None:
        with self._lock:
            future, work = self._waiting.pop()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


# Of the process, like Python's lock. Their threads begin with the first work.
_MIDDLING: Final = _Lane("slipstream-bodies")
_LONG: Final = _Lane("slipstream-long-bodies")


async def beside_the_loop(
    size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run ``function`` on a body of ``size`` bytes once it is its turn; it calls :func:`pause`.

    Whoever is cancelled while waiting leaves nothing to be done.
    """
    lane = _LONG if size > _LONG_BYTES else _MIDDLING
    working = lane.submit(OWNER.get(), lambda: function(*args, **kwargs))
    return await asyncio.wrap_future(working)


# Where the size is not known yet.
ANY_SIZE: Final = _LONG_BYTES + 1


def pause() -> None:
    """Let the event loop have its turn; call it after each piece."""
    time.sleep(_PAUSE)


class Turns:
    """Lets one long body after the other be decoded, with a turn of the event loop in between.

    Decoding is one call, of ten milliseconds for the longest bodies. Where many are ready at the
    same time, nobody else would have a turn before the last of them.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, size: int) -> None:
        """Wait for the turn of a body of ``size`` bytes, which is decoded without further waits."""
        if size > PIECE_BYTES:
            async with self._lock:
                await asyncio.sleep(0)
