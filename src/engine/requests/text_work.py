"""Work on requests' texts: short ones on the event loop, others in threads, owners in turns."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, ParamSpec, TypeVar

from src.core.cpus import usable_cpus
from src.core.errors import ShuttingDownError
from src.core.turn_pool import TurnPool

# Longer texts wait among themselves. Each takes a thread for tens of milliseconds, or seconds.
_LONG_CHARS: Final = 64 * 1024

# Up to this many characters tokenizing on the event loop is cheaper than in a thread: it takes a
# fraction of a millisecond.
INLINE_CHARS: Final = 512
# What any text costs beside its own characters' time, in characters.
_LEAST_CHARS: Final = 32
# Characters that the event loop tokenizes at once, a few milliseconds, and then in each second, so
# that it has over nine tenths of its time for everything else.
_BURST_CHARS: Final = 4096
_CHARS_PER_SECOND: Final = 100_000.0

P = ParamSpec("P")
T = TypeVar("T")


def chars_of_time(size: int) -> int:
    """How many characters take the time of tokenizing a text of ``size``: few for no text."""
    return max(size, _LEAST_CHARS)


class InlineBudget:
    """How much text the event loop tokenizes itself: some at once, and more as time goes by.

    A leaky bucket of characters. Whoever asks for one short text is answered without a thread, and
    whoever asks for thousands of them does not have the event loop for long.

    Parameters
    ----------
    clock
        Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used = 0.0
        self._at = clock()

    def take(self, size: int) -> bool:
        """Whether what takes ``size`` characters' time may be done here now; if so, it counts."""
        now = self._clock()
        self._used = max(0.0, self._used - (now - self._at) * _CHARS_PER_SECOND)
        self._at = now
        if size > INLINE_CHARS or self._used + size > _BURST_CHARS:
            return False
        self._used += size
        return True


class TextWork:
    """Threads for tokenizing and the like, those for long texts apart."""

    def __init__(self) -> None:
        threads = usable_cpus()
        self._short = TurnPool(threads, "slipstream-texts")
        self._long = TurnPool(threads, "slipstream-long-texts")
        self._inline = InlineBudget()
        self._is_closed = False

    async def soon(
        self, owner: str, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The same as `run`, but at once and here if it is little and the loop has time for it."""
        if self._inline.take(size):
            return function(*args, **kwargs)
        return await self.run(owner, size, function, *args, **kwargs)

    async def run(
        self, owner: str, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``function`` on a text of ``size`` characters once it is the turn of ``owner``.

        Whoever is cancelled while waiting leaves nothing to be done.

        Raises
        ------
        ShuttingDownError
            The engine was closed, before or meanwhile.
        """
        run = functools.partial(function, *args, **kwargs)
        try:
            # An error has this frame: no name in it holds the future, which holds the error.
            return await asyncio.wrap_future(self._submitted(owner, size, run))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and not (task is not None and task.cancelling()):
                raise _closed() from None
            raise

    def _submitted(self, owner: str, size: int, run: Callable[[], T]) -> Future[T]:
        pool = self._long if size > _LONG_CHARS else self._short
        try:
            return pool.submit(owner, run).future
        except RuntimeError:
            if not self._is_closed:  # no thread can be started, say
                raise
            raise _closed() from None

    def close(self) -> None:
        """End the threads; what waits fails. Blocks while some text is worked on."""
        self._is_closed = True
        self._short.close()
        self._long.close()


def _closed() -> ShuttingDownError:
    return ShuttingDownError("the engine was closed")
